"""The evaluation of the policy on validation data."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Sequence

import numpy as np

from trainer.config import Config
from trainer.data.datasets import Prompt
from trainer.environments.episode_runner import RolloutRequest
from trainer.episodes import Episode, Sample
from trainer.generation.engine import Sampling
from trainer.metrics.names import pass_at
from trainer.metrics.tracker import METRICS_FILE, read_metrics, values_of
from trainer.sources.base import Evaluation
from trainer.sources.rollout_runner import RolloutRunner, means, reward_terms

LOG = logging.getLogger(__name__)


class LossEvaluator:
    """Measures the cross-entropy of validation examples, in nats per token.

    Args:
        loss: returns the mean loss of samples under the current policy.
    """

    def __init__(self, examples: Sequence[Sample], loss: Callable[[Sequence[Sample]], float]):
        self._examples = examples
        self._loss = loss

    def evaluate(self, step: int) -> Evaluation:
        return Evaluation({"val/loss": self._loss(self._examples)})


class RolloutEvaluator:
    """Measures the greedy reward, the accuracy (share of successes) and pass@k of validation prompts."""

    def __init__(self, cfg: Config, runner: RolloutRunner, prompts: Sequence[Prompt]):
        self.cfg = cfg
        self._runner = runner
        self._prompts = prompts
        self._count = 0

    def evaluate(self, step: int) -> Evaluation:
        """Generate one greedy episode for each prompt, and `rollout.val_n` sampled ones; return their metrics."""
        k, r, runner = self.cfg.rollout.val_n, self.cfg.rollout, self._runner
        purpose = f"the evaluation of step {step}"
        sampled: list[Episode] = []
        with runner.awake():
            greedy = runner.run(self._requests(step, [0], runner.greedy()), purpose)
            metrics = self._reward_metrics(greedy, purpose)
            if k > 0:
                sampling = runner.sampling(r.temperature or 1.0, r.top_p, r.top_k)
                sampled = runner.run(self._requests(step, range(1, 1 + k), sampling), f"pass@{k} of step {step}")
                metrics |= self._pass_at_k(sampled)
        runner.journal.wait()  # what is logged must come back after a kill
        self._warn_without_success(step)
        return Evaluation(metrics, greedy, sampled)

    def _requests(self, step: int, numbers: Sequence[int], sampling: Sampling) -> list[RolloutRequest]:
        return [
            RolloutRequest(p, f"val:{p.index}", step, number, sampling) for p in self._prompts for number in numbers
        ]

    def _reward_metrics(self, greedy: Sequence[Episode], purpose: str) -> dict[str, float]:
        """Return the metrics of greedy episodes. Without any whose reward is known, there is no mean."""
        metrics = {"val/failures": float(sum(bool(episode.failure) for episode in greedy))}
        rewards = np.asarray([episode.reward for episode in greedy if episode.reward is not None])
        if not len(rewards):
            LOG.warning("%s: no reward is known, so there is no val/reward/mean and no val/accuracy", purpose)
            return metrics
        metrics["val/reward/mean"] = float(rewards.mean())
        metrics["val/accuracy"] = float((rewards >= self.cfg.reward.success_threshold).mean())
        return metrics | means("val/reward", reward_terms(greedy))

    def _pass_at_k(self, sampled: Sequence[Episode]) -> dict[str, float]:
        """Return the share of the prompts with a success, of those with a reward that is known."""
        n, threshold = len(sampled) // len(self._prompts), self.cfg.reward.success_threshold
        groups = [[episode.reward for episode in sampled[i : i + n]] for i in range(0, len(sampled), n)]
        known = [[reward for reward in group if reward is not None] for group in groups]
        passed = [max(group) >= threshold for group in known if group]
        return {pass_at(n): float(np.mean(passed))} if passed else {}

    def _warn_without_success(self, step: int) -> None:
        """Say once, after the second evaluation or the last step, that no reward has been a success."""
        threshold, largest = self.cfg.reward.success_threshold, self._runner.largest_reward
        self._count += 1
        due = self._count == 2 or (self._count == 1 and step == self.cfg.total_steps)
        if due and -math.inf < largest < threshold and not self._has_succeeded():
            LOG.warning(
                "no reward has reached reward.success_threshold=%g yet (the largest: %.4g), so val/accuracy is 0 and "
                "steps are compared by val/reward/mean; set the threshold to the reward of a success",
                threshold,
                largest,
            )

    def _has_succeeded(self) -> bool:
        """Whether an earlier start of this run has measured an accuracy above 0."""
        rows = read_metrics(os.path.join(self.cfg.trainer.run_dir, METRICS_FILE))
        return any(value > 0 for value in values_of(rows, "val/accuracy"))
