"""Whether a run is as good and as fast as before: after a recovery, and while it continues."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.errors import FailureSource
from trainer.metrics.names import PHASES
from trainer.metrics.tracker import values_of

STEPS = 3
"""Steps after a recovery whose median is compared. The first ones may be slower while caches fill."""
_HISTORY = 20
_FEWEST = 3
_SLOWER = 1.25
"""How far above the slowest of the steps before counts as slow. The speed of a run varies by itself."""
OWN_SPEED = 0.75
"""A rank below this share of the fastest rank's speed counts as slow. GPUs of one kind differ by less."""
_WATCHED = (
    "policy/loss",
    "policy/grad_norm",
    "reward/mean",
    "time/step",
    "perf/tokens_per_s",
)
_COUNTERS = ("progress/prompts", "progress/samples")


def compare_since(rows: Sequence[Mapping[str, Any]], step: int, watched: Sequence[str] = ()) -> list[str]:
    """Return lines for people: metrics and counters from `step` on, beside those of the steps before it.

    Args:
        rows: lines of `metrics.jsonl`.
        step: the first step after an incident.
        watched: metrics of the run's own task that are compared, too.

    Returns:
        Empty if there is no step on one of the two sides.
    """
    steps = [row for row in rows if row["step"] > 0]
    before, after = [row for row in steps if row["step"] < step][-_HISTORY:], [r for r in steps if r["step"] >= step]
    if not before or not after:
        return []
    lines = [f"steps {after[0]['step']} to {after[-1]['step']}, beside the {len(before)} before"]
    for name in (*watched, *_WATCHED):
        new, old = values_of(after, name), values_of(before, name)
        if new and old:
            mean = statistics.fmean(new)
            lines.append(f"{name} {mean:.4g} on average, before {min(old):.4g} to {max(old):.4g}")
    for name in _COUNTERS:
        new, old = _rises(before[-1:] + after, name), _rises(before, name)
        if new and old:
            lines.append(f"{name} rises by {_range(new)} a step, before by {_range(old)}")
    return lines


def _rises(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    values = values_of(rows, name)
    return [new - old for old, new in zip(values, values[1:], strict=False)]


def _range(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def name_slow_ranks(speeds: Mapping[FailureSource, float]) -> str:
    """Return a sentence about the ranks that compute more slowly than the others.

    Args:
        speeds: of each rank, in FLOP/s, without waiting for another one. NaN: not known.
    """
    measured = _known(speeds)
    fastest = max(measured.values(), default=0.0)
    slow = sorted((speed / fastest, origin) for origin, speed in measured.items() if speed < OWN_SPEED * fastest)
    if not slow:
        return "no rank computes more slowly than the others, so look at the network, the storage and the engines"
    named = [f"{origin.name} on {origin.node} ({share:.0%})" for share, origin in slow]
    return f"slower than the fastest rank, each measured by itself: {', '.join(named)}"


def slowest_share(speeds: Mapping[FailureSource, float]) -> float | None:
    """Return the speed of the slowest rank, divided by that of the fastest; None: there are not two to compare."""
    known = _known(speeds).values()
    return min(known) / max(known) if len(known) > 1 and max(known) > 0 else None


def _known(speeds: Mapping[FailureSource, float]) -> dict[FailureSource, float]:
    return {origin: speed for origin, speed in speeds.items() if math.isfinite(speed)}


class SlowdownCheck:
    """Says when the speed of each rank should be measured, which takes half a second.

    That is once the usual speed of the ranks is known, and again when they have been slower for a while.
    """

    def __init__(self) -> None:
        self._usual: deque[float] = deque(maxlen=_HISTORY)
        self._slow = 0
        self._since = 0
        """Steps since the last measurement."""

    def update(self, metrics: Mapping[str, float]) -> bool:
        """Add a step. Return whether to measure now."""
        seconds = sum(metrics.get(f"time/{phase}", 0.0) for phase in ("logprob", "update"))
        tokens = metrics.get("perf/tokens_per_s", 0.0) * metrics.get("time/step", 0.0)
        if not (seconds > 0 and tokens > 0):
            return False
        speed, was_known = tokens / seconds, len(self._usual) == _HISTORY
        is_slow = was_known and _SLOWER * speed < statistics.median(self._usual)
        self._usual.append(speed)
        self._slow = self._slow + 1 if is_slow else 0
        self._since += 1
        is_first = not was_known and len(self._usual) == _HISTORY
        if not is_first and (self._slow < STEPS or self._since < _HISTORY):
            return False
        self._since = 0
        return True


class RecoveryCheck:
    """Compares the speed of the first steps after a recovery with the band of the steps before the incident.

    Args:
        rows: lines of `metrics.jsonl` before the incident, those that are trained again included.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]]):
        self._before = [row for row in rows if row.get("time/step")][-_HISTORY:]
        self._after: list[Mapping[str, float]] = []

    def update(self, metrics: Mapping[str, float]) -> str | None:
        """Add a step. After `STEPS` steps, return a sentence if they were slow; else None."""
        if len(self._before) < _FEWEST or len(self._after) == STEPS:
            return None
        self._after.append(metrics)
        return self._judge() if len(self._after) == STEPS else None

    def _judge(self) -> str | None:
        now, was = self._median(self._after, "time/step"), self._median(self._before, "time/step")
        slowest = max(row["time/step"] for row in self._before)
        if now <= _SLOWER * slowest:
            return None
        medians = {p: [self._median(rows, f"time/{p}") for rows in (self._before, self._after)] for p in PHASES}
        phase, (before, after) = max(medians.items(), key=lambda item: item[1][1] - item[1][0])
        return (
            f"since the recovery, a step takes {now:.3g} s; before it took {was:.3g} s, and {slowest:.3g} s at most. "
            f"The slow phase is {phase}: {after:.3g} s in place of {before:.3g} s"
        )

    @staticmethod
    def _median(rows: Sequence[Mapping[str, Any]], name: str) -> float:
        return statistics.median(row.get(name) or 0.0 for row in rows)
