"""The rewards of completions: the weighted sums of the results of all rewards, and the failures among them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from trainer.process.signals import CONTINUES
from trainer.rewards.cache import Result
from trainer.rewards.parsing import Terms
from trainer.rewards.terms import Call, RewardFunction
from trainer.sandbox import limits
from trainer.sandbox.pool import NOT_TRIED

_OUTCOMES = {"leave_out": "are left out", "zero": "count as 0"}
"""What becomes of failures, by `reward.on_failure` or `environment.on_failure`."""
_OF_EPISODES = "have a reward of 0, or are left out if the policy had not replied"
"""What becomes of episodes with `leave_out`."""
_NAMES = {"reward": "rewards", "environment": "episodes"}


@dataclass
class Failures:
    """Completions whose reward could not be computed, or episodes whose environment failed."""

    count: int = 0
    first: str = ""
    skipped: int = 0
    """Those among them that were not tried, because failed calls had taken too much time."""
    section: str = "reward"
    """Section of the config: `reward` or `environment`."""
    mostly: str = ""
    """Of failures of several sources: how many are of the one with the most, in words."""

    @classmethod
    def among(cls, reasons: Iterable[str], section: str = "reward") -> Failures:
        """Return the failures for which `reasons` has a reason; it is empty where nothing failed."""
        failed = [reason for reason in reasons if reason]
        skipped = sum(NOT_TRIED in reason for reason in failed)
        return cls(len(failed), failed[0] if failed else "", skipped, section)

    @classmethod
    def together(cls, names: Sequence[str], failures: Sequence[Failures]) -> Failures:
        """Return the failures of the sources with these names. The first is of the source with the most."""
        name, worst = max(zip(names, failures, strict=True), key=lambda one: one[1].count)
        count, skipped = sum(one.count for one in failures), sum(one.skipped for one in failures)
        mostly = f", {worst.count} of them for {name}" if name else ""
        return cls(count, worst.first, skipped, worst.section, mostly)

    def lines(self, total: int, on_failure: str, step: str) -> list[str]:
        """Return messages for the user.

        Args:
            total: what could have failed.
            on_failure: `reward.on_failure` or `environment.on_failure`.
            step: names what they were for.
        """
        lines = []
        if self.count:
            is_mixed = self.section == "environment" and on_failure == "leave_out"
            outcome = _OF_EPISODES if is_mixed else _OUTCOMES[on_failure]
            lines.append(f"{self._share(total, step)} failed and {outcome}; the first: {self.first}")
        if self.skipped:
            times = f"{limits.FAILED_TIME_LIMITS} times {self.section}.timeout_s"
            lines.append(
                f"{self.skipped} of them were not tried: failed calls had already taken {times} for each process"
            )
        return lines

    def problem(self, total: int, most: float, step: str) -> str | None:
        """Return why the run must end; None: it need not.

        Args:
            total: what could have failed.
            most: the share that may have failed.
            step: names what they were for.
        """
        if self.count <= most * total:
            return None
        return (
            f"{self.section}.max_error_rate={most:g}: {self._share(total, step)} failed{self.mostly} (the first: "
            f"{self.first}); nothing was trained on them, and once the {self.section} works, {CONTINUES}"
        )

    def _share(self, total: int, step: str) -> str:
        return f"{self.count} of {total} {_NAMES[self.section]} of {step or 'a step'} ({self.count / total:.1%})"


@dataclass
class Scores:
    """The rewards of completions, in their order."""

    rewards: list[float]
    """Where a reward failed: 0, or the sum of the terms that did not fail."""
    terms: list[Terms]
    """The terms of each reward, before they are weighed."""
    reasons: list[str]
    """Why each reward failed; empty for one that did not."""
    failures: Failures = field(default_factory=Failures)
    accept: Callable[[], None] = field(default=lambda: None, compare=False)
    """Called when the step uses the rewards, because not too many have failed."""

    def each(self) -> list[tuple[float, Terms, str]]:
        """Return reward, terms and reason of each completion."""
        return list(zip(self.rewards, self.terms, self.reasons, strict=True))


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
    for index, reward in enumerate(rewards):
        if not abs(reward) <= limits.LARGEST_REWARD:  # infinite weights make it NaN
            reasons[index] = reasons[index] or f"is {reward:g}, beyond {limits.LARGEST_REWARD:g}"
            rewards[index] = 0.0
    return Scores(rewards, terms, reasons, Failures.among(reasons))


def _named(function: RewardFunction, value: Terms | str, others: Terms) -> Terms | str:
    """Return the terms by their names in metrics, or the reason why there are none."""
    if isinstance(value, str):
        return value
    named = {name or function.label: number for name, number in value.items()}
    double = next((name for name in named if name in others), None)
    return named if double is None else f"returned a term {double}, as another reward does"
