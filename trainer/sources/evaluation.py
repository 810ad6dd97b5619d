"""The evaluation of the policy on held-out prompts."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Sequence

import numpy as np

from trainer.config import Config
from trainer.data.datasets import Prompt
from trainer.environments.episode_runner import Attempt
from trainer.metrics.best import find_best
from trainer.metrics.names import pass_at
from trainer.metrics.samples import Transcript, write_validation
from trainer.metrics.tracker import METRICS_FILE, read_metrics
from trainer.sources.playing import Judged, Playing, known_parts, means

LOG = logging.getLogger(__name__)


class Evaluation:
    """Evaluates the policy on held-out prompts.

    Args:
        fence: raises when this process no longer holds the run directory.
    """

    def __init__(self, cfg: Config, playing: Playing, prompts: Sequence[Prompt], fence: Callable[[], None]):
        self.cfg = cfg
        self._playing = playing
        self._prompts = prompts
        self._fence = fence
        self._count = 0

    def run(self, step: int) -> tuple[dict[str, float], list[Transcript]]:
        """Return the metrics of a step's evaluation, and its greedy episodes."""
        prompts, k, r = self._prompts, self.cfg.rollout.val_n, self.cfg.rollout
        attempts = [self._attempt(p, step, 0) for p in prompts]
        purpose = f"the evaluation of step {step}"
        greedy = self._playing.play(attempts, self._playing.greedy(), prompts, purpose)
        metrics = self._describe(greedy, purpose)
        transcripts = self._transcripts(greedy, first=0)
        written = transcripts
        if k > 0:
            attempts = [self._attempt(p, step, 1 + j) for p in prompts for j in range(k)]
            sampling = self._playing.sampling(r.temperature or 1.0, r.top_p, r.top_k)
            sampled = self._playing.play(attempts, sampling, prompts, f"pass@{k} of step {step}")
            metrics |= self._pass_at_k(sampled)
            written = transcripts + self._transcripts(sampled, first=1)
        if self.cfg.logger.validation:
            write_validation(self.cfg.trainer.run_dir, step, written, self._fence)
        self._warn_without_success(step)
        return metrics, transcripts

    def _describe(self, greedy: Sequence[Judged], purpose: str) -> dict[str, float]:
        """Return the metrics of greedy episodes. Without any whose reward is known, there is no mean."""
        metrics = {"val/failures": float(sum(bool(one.failure) for one in greedy))}
        rewards = np.asarray([one.reward for one in greedy if one.reward is not None])
        if not len(rewards):
            LOG.warning("%s: no reward is known, so there is no val/reward/mean and no val/accuracy", purpose)
            return metrics
        metrics["val/reward/mean"] = float(rewards.mean())
        metrics["val/accuracy"] = float((rewards >= self.cfg.reward.success_threshold).mean())
        return metrics | means("val/reward", known_parts(greedy))

    def _pass_at_k(self, sampled: Sequence[Judged]) -> dict[str, float]:
        """Return the share of the prompts with a success, of those with a reward that is known."""
        n, threshold = len(sampled) // len(self._prompts), self.cfg.reward.success_threshold
        groups = [[one.reward for one in sampled[i : i + n]] for i in range(0, len(sampled), n)]
        known = [[reward for reward in group if reward is not None] for group in groups]
        passed = [max(group) >= threshold for group in known if group]
        return {pass_at(n): float(np.mean(passed))} if passed else {}

    def _transcripts(self, judged: Sequence[Judged], first: int) -> list[Transcript]:
        """Return as many transcripts for each prompt, those of one prompt together, numbered from `first`."""
        n = len(judged) // len(self._prompts)
        return [
            self._playing.transcript(prompt, one, f"val:{prompt.index}", first + i % n)
            for i, one in enumerate(judged)
            for prompt in [self._prompts[i // n]]
        ]

    def _warn_without_success(self, step: int) -> None:
        """Say once, after the second evaluation or the last step, that no reward has been a success."""
        threshold, largest = self.cfg.reward.success_threshold, self._playing.largest_reward
        self._count += 1
        due = self._count == 2 or (self._count == 1 and step == self.cfg.trainer.total_steps)
        if due and -math.inf < largest < threshold and not self._has_succeeded():
            LOG.warning(
                "no reward has reached reward.success_threshold=%g yet (the largest: %.4g), so val/accuracy is 0 and "
                "steps are compared by val/reward/mean; set the threshold to the reward of a success",
                threshold,
                largest,
            )

    def _has_succeeded(self) -> bool:
        """Whether an earlier start of this run has measured an accuracy above 0."""
        best = find_best(read_metrics(os.path.join(self.cfg.trainer.run_dir, METRICS_FILE)), "val/accuracy", "max")
        return best is not None and best.value > 0

    def _attempt(self, prompt: Prompt, step: int, number: int) -> Attempt:
        return Attempt(prompt.row, prompt.token_ids, f"val:{prompt.index}", step, number)
