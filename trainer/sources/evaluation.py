"""The evaluation of the policy on validation data."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from trainer.config import Config
from trainer.data.datasets import Prompt
from trainer.environments.episode_runner import RolloutRequest
from trainer.episodes import Episode
from trainer.generation.engine import Sampling
from trainer.metrics.estimates import means_of, row_values
from trainer.metrics.names import of_val_set, pass_at
from trainer.process.tracing import TRACER
from trainer.sources.base import Evaluation
from trainer.sources.episode_metrics import known_rewards, means, player_metrics, reward_terms
from trainer.sources.rollouts import Rollouts

LOG = logging.getLogger(__name__)

VALIDATION = "validation"  # the name of an evaluation in the timeline


class LossEvaluator:
    """Measures the objective's own loss and metrics of held-out episodes, as `val/loss` and so on.

    Args:
        held_out: of the learner; returns them under the current policy.
    """

    def __init__(self, episodes: Sequence[Episode], held_out: Callable[[Sequence[Episode]], Mapping[str, float]]):
        self._episodes = episodes
        self._held_out = held_out

    def evaluate(self, step: int) -> Evaluation:
        with TRACER.span(VALIDATION):
            return Evaluation({f"val/{name}": value for name, value in self._held_out(self._episodes).items()})


class RolloutEvaluator:
    """Measures greedy reward, accuracy (share of successes) and pass@k of validation prompts, and of named sets.

    Args:
        prompts: of `data.val_files` or the generator. Empty: there are none.
        sets: the prompts of each of `data.val_sets`.
    """

    def __init__(
        self,
        cfg: Config,
        rollouts: Rollouts,
        prompts: Sequence[Prompt],
        sets: Mapping[str, Sequence[Prompt]] | None = None,
    ):
        self.cfg = cfg
        self._rollouts = rollouts
        self._prompts = prompts
        self._sets = sets or {}

    def evaluate(self, step: int) -> Evaluation:
        """Evaluate what is due at `step`, all of it with the weights that the engines have now."""
        cfg = self.cfg
        names = [name for name in self._sets if cfg.is_due(cfg.data.val_sets[name].interval_in(cfg), step)]
        with TRACER.span(VALIDATION):
            return self.evaluate_sets(step, names, with_default=cfg.is_due(cfg.trainer.val_interval, step))

    def evaluate_sets(self, step: int, names: Sequence[str], with_default: bool) -> Evaluation:
        """Evaluate the named sets, and the prompts that belong to none if `with_default`.

        The metrics of these prompts are of one greedy episode each, and of `rollout.val_n` sampled ones.
        """
        r, rollouts = self.cfg.rollout, self._rollouts
        metrics: dict[str, float] = {}
        greedy: list[Episode] = []
        sampled: list[Episode] = []
        sets: dict[str, list[Episode]] = {}
        with rollouts.engines.awake():
            if with_default and self._prompts:
                purpose = f"the evaluation of step {step}"
                greedy = rollouts.evaluate(self._requests(step, [0], rollouts.greedy()), purpose)
                if r.val_n > 0:
                    sampling = rollouts.sampling(r.temperature or 1.0, r.top_p, r.top_k)
                    requests = self._requests(step, range(1, 1 + r.val_n), sampling)
                    sampled = rollouts.evaluate(requests, f"pass@{r.val_n} of step {step}")
                metrics = self._reward_metrics(greedy, step) | (self._pass_at_k(sampled) if sampled else {})
            for name in names:
                sets[name], of_set = self._evaluate_set(name, step)
                metrics |= of_set
        rollouts.journal.wait()  # what is logged must come back after a kill
        samples = [
            sample
            for episode in [*greedy, *sampled, *(episode for episodes in sets.values() for episode in episodes)]
            for sample in episode.samples
            if sample.mask.any()
        ]
        versions = {version for sample in samples for version in sample.weight_versions or ()}
        assert len(versions) <= 1, f"several versions of the weights were evaluated as one: {sorted(versions)}"
        return Evaluation(metrics, greedy, sampled, sets)

    def _evaluate_set(self, name: str, step: int) -> tuple[list[Episode], dict[str, float]]:
        """Return the episodes of a named set, those of one row together, and their metrics."""
        r, settings = self.cfg.rollout, self.cfg.data.val_sets[name]
        temperature, purpose = settings.temperature_in(self.cfg), f"the evaluation of {name} in step {step}"
        top_p, top_k = (settings.top_p or r.top_p, settings.top_k or r.top_k) if temperature else (1.0, -1)
        sampling = self._rollouts.sampling(temperature, top_p, top_k)
        sampling = dataclasses.replace(sampling, max_tokens=settings.max_response_tokens or sampling.max_tokens)
        requests = [
            RolloutRequest(prompt, f"val:{name}:{prompt.index}", step, number, sampling)
            for prompt in self._sets[name]
            for number in range(settings.n)
        ]
        episodes = self._rollouts.evaluate(requests, purpose)
        found = means_of(row_values(rewards_by_row(episodes, settings.n), settings.reward.success_threshold))
        if not found:
            LOG.warning("%s: no reward is known, so there is no accuracy", purpose)
        found["failures"] = float(sum(bool(episode.failure) for episode in episodes))
        found |= player_metrics(episodes)
        return episodes, {of_val_set(name, measure): value for measure, value in found.items()}

    def _requests(self, step: int, numbers: Sequence[int], sampling: Sampling) -> list[RolloutRequest]:
        return [
            RolloutRequest(p, f"val:{p.index}", step, number, sampling) for p in self._prompts for number in numbers
        ]

    def _reward_metrics(self, greedy: Sequence[Episode], step: int) -> dict[str, float]:
        """Return the metrics of greedy episodes. Without any whose reward is known, there is no mean."""
        metrics = {"val/failures": float(sum(bool(episode.failure) for episode in greedy))}
        rewards = np.asarray([reward for some in known_rewards(greedy).values() for reward in some])
        if not len(rewards):
            LOG.warning(
                "the evaluation of step %d: no reward is known, so there is no val/reward/mean and no val/accuracy",
                step,
            )
            return metrics
        metrics["val/reward/mean"] = float(rewards.mean())
        metrics["val/accuracy"] = float((rewards >= self.cfg.reward.success_threshold).mean())
        metrics |= {f"val/{name}": value for name, value in player_metrics(greedy).items()}
        return metrics | means("val/reward", reward_terms(greedy))

    def _pass_at_k(self, sampled: Sequence[Episode]) -> dict[str, float]:
        """Return the share of the prompts with a success, of those whose rewards are all known."""
        n, threshold = len(sampled) // len(self._prompts), self.cfg.reward.success_threshold
        known = [[reward for reward in group if reward is not None] for group in rewards_by_row(sampled, n)]
        passed = [max(group) >= threshold for group in known if len(group) == n]
        return {pass_at(n): float(np.mean(passed))} if passed else {}


def rewards_by_row(episodes: Sequence[Episode], n: int) -> list[list[float | None]]:
    """Return the rewards of the n episodes of each row, which follow one another."""
    return [[episode.reward for episode in episodes[i : i + n]] for i in range(0, len(episodes), n)]
