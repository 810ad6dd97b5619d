"""The best step of a run, by `trainer.best_metric`: one rule for the run, its result, comparisons and sweeps.

Step 0, the initial weights, is no result of training: it counts only if no later step has measured the metric.

A run whose rewards never reach `reward.success_threshold` has a `val/accuracy` of 0 at every step. Then the mean reward
says which step is the best.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from trainer.config.tasks import ACCURACY

INSTEAD = "val/reward/mean"
"""The metric that steps are compared by until one has an accuracy above 0."""


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
    measured = [row for row in rows if row.get(metric) is not None and math.isfinite(row[metric])]
    measured = [row for row in measured if row["step"] > 0] or measured
    if not measured:
        return None
    row = (max if mode == "max" else min)(measured, key=lambda row: row[metric])
    return Best(metric, float(row[metric]), row["step"])


def compared_metric(best: Mapping[str, float], best_metric: str, metrics: Mapping[str, float]) -> str:
    """Return the metric that steps are compared by.

    Args:
        best: the best value so far (see `better`).
        metrics: of the present step.
    """
    succeeded = max(best.get(ACCURACY, 0.0), metrics.get(ACCURACY, 0.0)) > 0
    return INSTEAD if best_metric == ACCURACY and not succeeded else best_metric


def better(
    best: dict[str, float], best_metric: str, mode: str, step: int, metrics: Mapping[str, float]
) -> dict[str, float]:
    """Return `{metric: value, "step": step}` of the better one: `best`, or the step that has these metrics.

    Args:
        best: empty if no step has been compared yet. If it has another metric, it does not count.
        mode: `max` or `min`.
    """
    metric = compared_metric(best, best_metric, metrics)
    value = metrics.get(metric)
    if value is None or not math.isfinite(value):
        return best
    sign = 1 if mode == "max" else -1
    is_trained = best.get("step", 0) > 0 or step == 0
    if metric in best and is_trained and not sign * value > sign * best[metric]:
        return best
    return {metric: value, "step": step}


def score_of(best: Mapping[str, float], best_metric: str, mode: str, metrics: Mapping[str, float]) -> dict[str, Any]:
    """Return what the manifest of a checkpoint says of its score. The arguments are those of `better`."""
    metric = compared_metric(best, best_metric, metrics)
    score = metrics.get(metric)
    is_known = score is not None and math.isfinite(score)
    return {"score_metric": metric, "score_mode": mode, "score": score if is_known else None}


def best_so_far(rows: Iterable[Mapping[str, Any]], best_metric: str, mode: str) -> dict[str, float]:
    """Return what `better` returns after the lines of a `metrics.jsonl`."""
    best: dict[str, float] = {}
    for row in rows:
        best = better(best, best_metric, mode, row["step"], _numbers(row))
    return best


def best_of(rows: Iterable[Mapping[str, Any]], best_metric: str, mode: str) -> Best | None:
    """Return the best step in the lines of a `metrics.jsonl`, by the rule of the run itself; None if there is none."""
    best = best_so_far(rows, best_metric, mode)
    return next((Best(name, float(value), int(best["step"])) for name, value in best.items() if name != "step"), None)


def instead_of(best_metric: str) -> str:
    """Return the metric of the best checkpoint if none has a `best_metric` that says something."""
    return compared_metric({}, best_metric, {})


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the values of a line that are finite: `null` stands for the others."""
    return {name: value for name, value in row.items() if isinstance(value, (int, float))}
