"""The rewards of completions: the weighted sums of the results of all rewards, and the failures among them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from trainer.process.signals import CONTINUES
from trainer.rewards.cache import Result
from trainer.rewards.parsing import LARGEST, Parts
from trainer.rewards.terms import Call, RewardFunction
from trainer.sandbox import limits
from trainer.sandbox.pool import NOT_TRIED

OUTCOMES = {"leave_out": "are left out", "zero": "count as 0"}
"""What becomes of rewards that failed, by `reward.on_failure` or `environment.on_failure`."""


@dataclass
class RewardFailures:
    """Completions whose reward, or a part of it, could not be computed."""

    count: int = 0
    first: str = ""
    skipped: int = 0
    """Completions among them that were not tried, because failed rewards had taken too much time."""

    def add(self, reason: str, skipped: bool = False) -> None:
        self.first = self.first or reason
        self.count += 1
        self.skipped += skipped

    def lines(self, total: int, on_failure: str, step: str) -> list[str]:
        """Return messages for the user.

        Args:
            total: the completions that were judged.
            on_failure: `reward.on_failure`.
            step: what they were judged for.
        """
        lines = []
        if self.count:
            lines.append(f"{self._share(total, step)} failed and {OUTCOMES[on_failure]}; the first: {self.first}")
        if self.skipped:
            times = f"{limits.FAILED_TIME_LIMITS} times reward.timeout_s"
            lines.append(
                f"{self.skipped} of them were not tried: failed rewards had already taken {times} for each process"
            )
        return lines

    def problem(self, total: int, most: float, step: str) -> str | None:
        """Return why the run must end; None: it need not.

        Args:
            total: the completions that were judged.
            most: the share of them that may have failed.
            step: what they were judged for.
        """
        if self.count <= most * total:
            return None
        return (
            f"reward.max_error_rate={most:g}: {self._share(total, step)} failed (the first: {self.first}); nothing "
            f"was trained on them, and once the reward works, {CONTINUES}"
        )

    def _share(self, total: int, step: str) -> str:
        return f"{self.count} of {total} rewards of {step or 'a step'} ({self.count / total:.1%})"


@dataclass
class Scores:
    """The rewards of completions, in their order."""

    rewards: list[float]
    """Where a reward failed: 0, or the sum of the parts that did not fail."""
    parts: list[Parts]
    """What each reward consists of, by name and before it is weighed."""
    reasons: list[str]
    """Why each reward failed; empty for one that did not."""
    failures: RewardFailures = field(default_factory=RewardFailures)


def add_up(results: Mapping[RewardFunction, Mapping[Call, Result]], total: int) -> Scores:
    """Return the weighted sums of all rewards for `total` completions.

    A part of the name that another reward has given already is a failure.
    """
    rewards, parts, reasons = [0.0] * total, [Parts() for _ in range(total)], [""] * total
    for component, group in results.items():
        for call, result in group.items():
            for index, value in zip(call.indices, result, strict=True):
                named = _named(component, value, parts[index])
                if isinstance(named, str):
                    prefix = f"{component.label}: " if len(results) > 1 else ""
                    reasons[index] = reasons[index] or prefix + named
                else:
                    parts[index] |= named
                    rewards[index] += component.weight * sum(named.values())
    failures = RewardFailures()
    for index, reward in enumerate(rewards):
        if not abs(reward) <= LARGEST:  # infinite weights make it NaN
            reasons[index], rewards[index] = reasons[index] or f"is {reward:g}, beyond {LARGEST:g}", 0.0
        if reasons[index]:
            failures.add(reasons[index], skipped=NOT_TRIED in reasons[index])
    return Scores(rewards, parts, reasons, failures)


def _named(component: RewardFunction, value: Parts | str, others: Parts) -> Parts | str:
    """Return the parts by their names in metrics, or the reason why there are none."""
    if isinstance(value, str):
        return value
    named = {name or component.label: number for name, number in value.items()}
    double = next((name for name in named if name in others), None)
    return named if double is None else f"returned a part {double}, as another reward does"
