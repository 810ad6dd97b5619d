"""What the metrics say about the health of a run: it has diverged, or it trains but learns little.

Only metrics are used, so a resumed run gives the same answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

_ROUNDING = 1e-12
"""Largest standard deviation of equal rewards, relative to their mean."""


@dataclass(frozen=True)
class _Symptom:
    """A reason for a warning."""

    is_present: Callable[[Mapping[str, float]], bool]
    metrics: tuple[str, ...]
    """The metrics that `is_present` reads."""
    steps: int
    """Number of consecutive steps with the symptom before the warning, and without it before the next warning."""
    message: str
    """The warning, without its beginning `since step N, `."""


_EQUAL_IN_GROUPS = _Symptom(
    lambda m: m["reward/zero_std_frac"] == 1,
    ("reward/zero_std_frac",),
    3,
    "all completions of each prompt have had the same reward (reward/zero_std_frac is 1), so nothing is learnt from "
    "rewards; try a larger rollout.n or rollout.temperature, easier or harder prompts, or a reward with finer grades",
)
_EQUAL = _Symptom(
    lambda m: m["reward/std"] <= _ROUNDING * max(1.0, abs(m["reward/mean"])),
    ("reward/std", "reward/mean"),
    3,
    "all completions have had the same reward (reward/std is 0), so nothing is learnt from rewards; try a larger "
    "rollout.temperature, easier or harder prompts, or a reward with finer grades",
)
_USELESS_CRITIC = _Symptom(
    lambda m: m["critic/explained_variance"] <= 0,
    ("critic/explained_variance",),
    10,
    "the critic has explained nothing of the returns (critic/explained_variance is at most 0); try another "
    "trainer.critic.optimizer.lr, or more trainer.critic.warmup_steps in a new run",
)
_TRUNCATED = _Symptom(
    lambda m: m["response_length/clip_ratio"] > 0.5,
    ("response_length/clip_ratio",),
    3,
    "more than half of the completions have been cut off (response_length/clip_ratio is above 0.5); try a larger "
    "rollout.max_response_tokens, or algorithm.overlong_buffer, which makes long completions cost reward",
)


@dataclass
class _Counter:
    """How often a symptom has been present."""

    since: int = 0
    present: int = 0
    """Consecutive steps with the symptom."""
    absent: int = 0
    """Consecutive steps without it."""
    has_warned: bool = False

    def update(self, step: int, is_present: bool, steps: int) -> bool:
        """Count a step. Return whether to warn now."""
        if not is_present:
            self.present, self.absent = 0, self.absent + 1
            self.has_warned &= self.absent < steps
            return False
        self.since = self.since if self.present else step
        self.present, self.absent = self.present + 1, 0
        warn = self.present >= steps and not self.has_warned
        self.has_warned |= warn
        return warn


class TrainingWarnings:
    """Warns once about each symptom, and again only after the symptom was absent.

    Args:
        compares_completions: the advantages compare the completions of a prompt. In this case, different rewards of
            different prompts teach nothing.
        history: the lines of `metrics.jsonl` before the first `update`.
    """

    def __init__(self, compares_completions: bool, history: Iterable[Mapping[str, Any]] = ()) -> None:
        equal = _EQUAL_IN_GROUPS if compares_completions else _EQUAL
        self._counters = [(symptom, _Counter()) for symptom in (equal, _USELESS_CRITIC, _TRUNCATED)]
        for row in history:
            self.update(row["step"], row)

    def update(self, step: int, metrics: Mapping[str, Any]) -> list[str]:
        """Return the warnings about the metrics of a finished step."""
        warnings = []
        for symptom, counter in self._counters:
            if any(name not in metrics for name in symptom.metrics):
                continue  # a validation before training, or a run without a critic
            # `metrics.jsonl` has null for a number that is not finite.
            is_finite = all(metrics[name] is not None and math.isfinite(metrics[name]) for name in symptom.metrics)
            if counter.update(step, is_finite and symptom.is_present(metrics), symptom.steps):
                warnings.append(f"since step {counter.since}, {symptom.message}")
        return warnings


@dataclass(frozen=True)
class Divergence:
    """A metric that has diverged."""

    metric: str
    limit: float
    first_step: int
    """The first of the consecutive steps above the limit."""
    value: float
    """The value of the last step."""

    def __str__(self) -> str:
        return (
            f"{self.metric} has been above {self.limit:g} since step {self.first_step}, and is {self.value:.4g} now "
            "(trainer.divergence_limits)"
        )


class DivergenceCheck:
    """Finds metrics that stay above their limits.

    Args:
        limits: limits by metric (`trainer.divergence_limits`).
        steps: number of consecutive steps that must be above the limit (`trainer.divergence_patience`).
        history: the lines of `metrics.jsonl` before the first `update`.
    """

    def __init__(self, limits: Mapping[str, float], steps: int, history: Iterable[Mapping[str, Any]] = ()):
        self._limits = limits
        self._steps = steps
        self._above: dict[str, list[int]] = {metric: [] for metric in limits}
        for row in history:
            self.update(row["step"], row)

    def update(self, step: int, metrics: Mapping[str, Any]) -> Divergence | None:
        """Count a finished step. Return the first metric that has diverged, or None.

        For a metric that is missing in a step, the step does not count.
        """
        divergence = None
        for metric, limit in self._limits.items():
            value, above = metrics.get(metric), self._above[metric]
            if value is None:
                continue
            if value <= limit:
                above.clear()
                continue
            above.append(step)
            if len(above) >= self._steps:
                divergence = divergence or Divergence(metric, limit, above[0], value)
        return divergence
