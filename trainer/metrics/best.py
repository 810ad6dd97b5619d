"""The best value of a metric in the log of a run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

ACCURACY = "val/accuracy"
SUPERVISED = ("val/loss", "min")


@dataclass(frozen=True)
class Best:
    """The best value of a metric, and the first step that reached it."""

    metric: str
    value: float
    step: int


def compared_by(best_metric: str, mode: str, supervised: bool) -> tuple[str, str]:
    """Return the metric that steps are compared by, and the mode: supervised training measures no accuracy."""
    return SUPERVISED if supervised and best_metric == ACCURACY else (best_metric, mode)


def find_best(rows: Iterable[Mapping[str, Any]], metric: str, mode: str, of_training: bool = False) -> Best | None:
    """Return the best value of `metric` in the lines of a `metrics.jsonl`; None if no line has a finite one.

    Args:
        mode: `max` or `min`.
        of_training: leave out step 0, the start weights, unless no later step has measured the metric. Runs that start
            from the same weights have the same value there.
    """
    known = [row for row in rows if row.get(metric) is not None and math.isfinite(row[metric])]
    if of_training:
        known = [row for row in known if row["step"] > 0] or known
    if not known:
        return None
    row = (max if mode == "max" else min)(known, key=lambda row: row[metric])
    return Best(metric, float(row[metric]), row["step"])
