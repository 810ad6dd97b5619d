"""The best step of a run, by `trainer.best_metric`: one rule for the run, its result and comparisons.

Step 0, the initial weights, counts as every other step: a run that has made them worse says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Best:
    """The best value of a metric, and the first step that reached it; 0: the initial weights."""

    metric: str
    value: float
    step: int
    start: float | None = None  # the value of the initial weights; None: it was not measured


def find_best(rows: Iterable[Mapping[str, Any]], metric: str, mode: str) -> Best | None:
    """Return the best value (`mode`: `max` or `min`) of `metric` in lines of `metrics.jsonl`; None: there is none."""
    best: dict[str, float] = {}
    for row in rows:
        best = better(best, metric, mode, row["step"], row)
    return Best(metric, float(best[metric]), int(best["step"]), best.get("start")) if best else None


def better(
    best: dict[str, float], metric: str, mode: str, step: int, metrics: Mapping[str, float | None]
) -> dict[str, float]:
    """Return `{metric: value, "step": step}` of the better one: `best` (empty, or of another metric: none), or this
    step's. Once step 0 has measured the metric, `start` is its value there."""
    value = metrics.get(metric)
    if value is None or not math.isfinite(value):
        return best
    sign = 1 if mode == "max" else -1
    if metric in best and not sign * value > sign * best[metric]:
        return best
    if step == 0:
        return {metric: value, "step": step, "start": value}
    return {**(best if metric in best else {}), metric: value, "step": step}


def sentence(best: Mapping[str, float]) -> str:
    """Return what `better` has found, as the end of a sentence; empty if no step has measured the metric."""
    if not best:
        return ""
    (metric,) = best.keys() - {"step", "start"}
    text = f", best {metric} {best[metric]:.3f}"
    if best["step"] == 0:
        return f"{text} at the start, which no step has beaten"
    return f"{text} at step {best['step']:.0f}" + (f", {best['start']:.3f} at the start" if "start" in best else "")


def score_of(metric: str, mode: str, metrics: Mapping[str, float], best: Mapping[str, float]) -> dict[str, Any]:
    """Return what the manifest of a checkpoint says of its score. The arguments are those of `better`."""
    score = metrics.get(metric)
    is_known = score is not None and math.isfinite(score)
    start = best.get("start") if metric in best else None
    return {"score_metric": metric, "score_mode": mode, "score": score if is_known else None, "score_of_start": start}
