"""Did the run come back as it was? Replayed steps are held against what the killed run had logged."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.durable import write_file
from trainer.metrics.tracker import METRICS_FILE, read_metrics

LOG = logging.getLogger(__name__)

REPLAY_FILE = "metrics.replay.jsonl"
WATCHED = ("policy/loss", "policy/kl", "policy/grad_norm", "reward/mean", "critic/loss", "sft/loss")
_WATCHED_STEPS = 3
_HISTORY = 20
_ROUNDING = 1e-3  # what another number of ranks may change in one step


class ReplayAudit:
    """Compares the first steps after a resume with the lines that were logged past the checkpoint.

    The lines are kept in `metrics.replay.jsonl` until they are replayed, so that a run killed again while it
    replays still has them. Where there are none, the first steps are held against their recent history.

    Args:
        step: of the checkpoint that was resumed from.
        tolerance: relative difference that counts as equal.
        same_layout: the work is split as when the lines were logged. Else sums are rounded differently,
            sampling soon departs, and only the first step is compared.
        same_run: the config computes what it computed then. Else the lines are dropped, and nothing is compared.
    """

    def __init__(self, run_dir: str, step: int, tolerance: float, same_layout: bool, same_run: bool = True):
        self._path = os.path.join(run_dir, REPLAY_FILE)
        self._tolerance = tolerance if same_layout else max(tolerance, _ROUNDING)
        self._same_layout = same_layout
        self._start = step
        rows = read_metrics(os.path.join(run_dir, METRICS_FILE))
        earlier = read_metrics(self._path)
        merged = {row["step"]: row for row in [*earlier, *rows] if row["step"] > step}
        self._expected = merged if same_layout else {n: row for n, row in merged.items() if n == step + 1}
        self._history = [row for row in rows if row["step"] <= step][-_HISTORY:]
        self._matched = 0
        if not same_run:
            self._expected = {}
            self._discard()
        elif merged:
            write_file(self._path, "".join(json.dumps(merged[n]) + "\n" for n in sorted(merged)))

    @property
    def pending(self) -> bool:
        """Steps remain to be compared."""
        return bool(self._expected)

    def check(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """Compare a step that was just trained; returns a sentence if it is not what was logged."""
        if not self._expected:
            if step <= self._start + _WATCHED_STEPS:
                for jump in jumps(metrics, self._history):
                    LOG.warning("after the resume, %s", jump)
            return None
        row = self._expected.pop(step, None)
        if row is not None:
            difference = first_difference(row, metrics, self._tolerance)
            if difference is not None:
                self._expected.clear()
                self._discard()
                return f"step {step} was not replayed as it had been logged: {difference}"
            self._matched += 1
        if not self._expected:
            self._discard()
            how = "identical" if self._tolerance == 0 else f"equal to {self._tolerance:g}"
            split = " (another number of ranks, or another split of the work: the first step alone can be compared)"
            other = "" if self._same_layout else split
            LOG.info("resume verified: %d replayed steps %s%s", self._matched, how, other)
        return None

    def _discard(self) -> None:
        if os.path.exists(self._path):
            os.remove(self._path)


def first_difference(logged: Mapping[str, Any], now: Mapping[str, float], tolerance: float) -> str | None:
    """The first metric, by name, that differs by more than `tolerance`; what a clock measured is left out."""
    for name in sorted(set(logged) & set(now)):
        if name.startswith(("time/", "perf/")) or name == "step":
            continue
        before, after = logged[name], float(now[name])
        after_or_none = after if math.isfinite(after) else None
        if before is None or after_or_none is None:
            same = before is after_or_none
        else:
            same = abs(before - after) <= tolerance * max(abs(before), abs(after), 1e-3)
        if not same:
            return f"{name} is {now[name]} and was {before}"
    return None


def jumps(metrics: Mapping[str, float], history: Sequence[Mapping[str, Any]]) -> list[str]:
    """Watched metrics that lie far outside their recent history."""
    found = []
    for name in WATCHED:
        past = [row[name] for row in history if row.get(name) is not None]
        value = metrics.get(name)
        if value is None or len(past) < 5:
            continue
        mean = sum(past) / len(past)
        deviation = math.sqrt(sum((x - mean) ** 2 for x in past) / len(past))
        if not abs(value - mean) <= 8 * deviation + 0.1 * abs(mean) + 1e-6:
            found.append(f"{name} jumped to {value:.4g}; over the {len(past)} steps before it was {mean:.4g} "
                         f"± {deviation:.2g}")  # fmt: skip
    return found
