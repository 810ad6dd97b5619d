"""Warnings about a run that trains but learns little. Metrics alone decide, so a resumed run gives the same ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

_ROUNDING = 1e-12
"""Standard deviation of equal rewards, relative to their mean."""


@dataclass(frozen=True)
class _Cause:
    """A reason to warn."""

    is_seen: Callable[[Mapping[str, float]], bool]
    metrics: tuple[str, ...]
    """What `is_seen` reads."""
    steps: int
    """Steps in a row that show it before the warning, and that do not show it before it is over."""
    sentence: str
    """What follows `since step N, `."""


_EQUAL_IN_GROUPS = _Cause(
    lambda m: m["reward/zero_std_frac"] == 1,
    ("reward/zero_std_frac",),
    3,
    "all completions of each prompt have had the same reward (reward/zero_std_frac is 1), so nothing is learnt from "
    "rewards; try a larger rollout.n or rollout.temperature, easier or harder prompts, or a reward with finer grades",
)
_EQUAL = _Cause(
    lambda m: m["reward/std"] <= _ROUNDING * max(1.0, abs(m["reward/mean"])),
    ("reward/std", "reward/mean"),
    3,
    "all completions have had the same reward (reward/std is 0), so nothing is learnt from rewards; try a larger "
    "rollout.temperature, easier or harder prompts, or a reward with finer grades",
)
_BLIND_CRITIC = _Cause(
    lambda m: m["critic/explained_variance"] <= 0,
    ("critic/explained_variance",),
    10,
    "the critic has explained nothing of the returns (critic/explained_variance is at most 0); try another "
    "trainer.critic.optimizer.lr, or more trainer.critic.warmup_steps in a new run",
)
_CUT_OFF = _Cause(
    lambda m: m["response_length/clip_ratio"] > 0.5,
    ("response_length/clip_ratio",),
    3,
    "more than half of the completions have been cut off (response_length/clip_ratio is above 0.5); try a larger "
    "rollout.max_response_tokens, or algorithm.overlong_buffer, which makes long completions cost reward",
)


@dataclass
class _Watch:
    """How often a cause has been seen."""

    since: int = 0
    seen: int = 0
    """Steps in a row that show it."""
    absent: int = 0
    """Steps in a row that do not."""
    is_warned: bool = False

    def update(self, step: int, is_seen: bool, steps: int) -> bool:
        """Count a step; return whether to warn now."""
        if not is_seen:
            self.seen, self.absent = 0, self.absent + 1
            self.is_warned &= self.absent < steps
            return False
        self.since = self.since if self.seen else step
        self.seen, self.absent = self.seen + 1, 0
        warn = self.seen >= steps and not self.is_warned
        self.is_warned |= warn
        return warn


class TrainingWarnings:
    """Warns once of each cause, and again only after the cause was over.

    Args:
        compares_completions: the advantages compare the completions of a prompt. Then different rewards of different
            prompts teach nothing.
        history: the lines of `metrics.jsonl` before the first `update`.
    """

    def __init__(self, compares_completions: bool, history: Iterable[Mapping[str, Any]] = ()) -> None:
        equal = _EQUAL_IN_GROUPS if compares_completions else _EQUAL
        self._watches = [(cause, _Watch()) for cause in (equal, _BLIND_CRITIC, _CUT_OFF)]
        for row in history:
            self.update(row["step"], row)

    def update(self, step: int, metrics: Mapping[str, Any]) -> list[str]:
        """Return a sentence for each warning that the metrics of a finished step give cause for."""
        warnings = []
        for cause, watch in self._watches:
            if any(name not in metrics for name in cause.metrics):
                continue  # a validation before training, or a run without such a part
            # `metrics.jsonl` has null for a number that is not finite.
            is_finite = all(metrics[name] is not None and math.isfinite(metrics[name]) for name in cause.metrics)
            if watch.update(step, is_finite and cause.is_seen(metrics), cause.steps):
                warnings.append(f"since step {watch.since}, {cause.sentence}")
        return warnings
