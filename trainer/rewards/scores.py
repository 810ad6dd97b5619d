"""The rewards of completions: the weighted sums of the results of all rewards, and the failures among them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from trainer.process.signals import CONTINUES
from trainer.rewards.cache import Result
from trainer.rewards.parsing import Terms
from trainer.rewards.terms import Call, RewardFunction
from trainer.sandbox import limits
from trainer.sandbox.pool import NOT_TRIED

OUTCOMES = {"leave_out": "are left out", "zero": "count as 0"}
"""What becomes of rewards that failed, by `reward.on_failure` or `environment.on_failure`."""


@dataclass
class RewardFailures:
    """Completions whose reward, or a term of it, could not be computed."""

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
            total: the completions that were scored.
            on_failure: `reward.on_failure`.
            step: what they were scored for.
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
            total: the completions that were scored.
            most: the share of them that may have failed.
            step: what they were scored for.
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
    """Where a reward failed: 0, or the sum of the terms that did not fail."""
    terms: list[Terms]
    """The terms of each reward, before they are weighed."""
    reasons: list[str]
    """Why each reward failed; empty for one that did not."""
    failures: RewardFailures = field(default_factory=RewardFailures)


def aggregate(results: Mapping[RewardFunction, Mapping[Call, Result]], total: int) -> Scores:
    """Return the weighted sums of all rewards for `total` completions.

    A term of the name that another reward has given already is a failure.
    """
    rewards, terms, reasons = [0.0] * total, [Terms() for _ in range(total)], [""] * total
    for function, group in results.items():
        for call, result in group.items():
            for index, value in zip(call.indices, result, strict=True):
                named = _named(function, value, terms[index])
                if isinstance(named, str):
                    prefix = f"{function.label}: " if len(results) > 1 else ""
                    reasons[index] = reasons[index] or prefix + named
                else:
                    terms[index] |= named
                    rewards[index] += function.weight * sum(named.values())
    failures = RewardFailures()
    for index, reward in enumerate(rewards):
        if not abs(reward) <= limits.LARGEST_REWARD:  # infinite weights make it NaN
            reasons[index] = reasons[index] or f"is {reward:g}, beyond {limits.LARGEST_REWARD:g}"
            rewards[index] = 0.0
        if reasons[index]:
            failures.add(reasons[index], skipped=NOT_TRIED in reasons[index])
    return Scores(rewards, terms, reasons, failures)


def _named(function: RewardFunction, value: Terms | str, others: Terms) -> Terms | str:
    """Return the terms by their names in metrics, or the reason why there are none."""
    if isinstance(value, str):
        return value
    named = {name or function.label: number for name, number in value.items()}
    double = next((name for name in named if name in others), None)
    return named if double is None else f"returned a term {double}, as another reward does"
