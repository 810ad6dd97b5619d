"""The best step of a run, by `trainer.best_metric`: one rule for the run, its result, comparisons and sweeps.

Step 0, the initial weights, is no result of training: it counts only if no later step has measured the metric.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Best:
    """The best value of a metric, and the first step that reached it."""

    metric: str
    value: float
    step: int


def find_best(rows: Iterable[Mapping[str, Any]], metric: str, mode: str) -> Best | None:
    """Return the best value of `metric` in the lines of a `metrics.jsonl`; None if no line has a finite one.

    Args:
        mode: `max` or `min`.
    """
    best: dict[str, float] = {}
    for row in rows:
        best = better(best, metric, mode, row["step"], row)
    return Best(metric, float(best[metric]), int(best["step"])) if best else None


def better(
    best: dict[str, float], metric: str, mode: str, step: int, metrics: Mapping[str, float | None]
) -> dict[str, float]:
    """Return `{metric: value, "step": step}` of the better one: `best`, or the step that has these metrics.

    Args:
        best: empty if no step has been compared yet. If it has another metric, it does not count.
        mode: `max` or `min`.
    """
    value = metrics.get(metric)
    if value is None or not math.isfinite(value):
        return best
    sign = 1 if mode == "max" else -1
    is_trained = best.get("step", 0) > 0 or step == 0
    if metric in best and is_trained and not sign * value > sign * best[metric]:
        return best
    return {metric: value, "step": step}


def score_of(metric: str, mode: str, metrics: Mapping[str, float]) -> dict[str, Any]:
    """Return what the manifest of a checkpoint says of its score. The arguments are those of `better`."""
    score = metrics.get(metric)
    is_known = score is not None and math.isfinite(score)
    return {"score_metric": metric, "score_mode": mode, "score": score if is_known else None}
