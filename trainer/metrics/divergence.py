"""Detect that a run has diverged: a metric is above its limit for several steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Divergence:
    """A metric that has diverged."""

    metric: str
    limit: float
    first_step: int
    """The first of the consecutive steps above the limit."""
    value: float
    """The value of the last step."""

    def __str__(self) -> str:
        return (
            f"{self.metric} has been above {self.limit:g} since step {self.first_step}, and is {self.value:.4g} now "
            "(trainer.divergence_limits)"
        )


class DivergenceCheck:
    """Finds metrics that stay above their limits. It uses only metrics, so a resumed run gets the same result.

    Args:
        limits: limits by metric (`trainer.divergence_limits`).
        steps: number of consecutive steps that must be above the limit (`trainer.divergence_patience`).
        history: the lines of `metrics.jsonl` before the first `update`.
    """

    def __init__(self, limits: Mapping[str, float], steps: int, history: Iterable[Mapping[str, Any]] = ()):
        self._limits = limits
        self._steps = steps
        self._above: dict[str, list[int]] = {metric: [] for metric in limits}
        for row in history:
            self.update(row["step"], row)

    def update(self, step: int, metrics: Mapping[str, Any]) -> Divergence | None:
        """Count a finished step. Return the first metric that has diverged, or None.

        For a metric that is missing in a step, the step does not count.
        """
        divergence = None
        for metric, limit in self._limits.items():
            value, above = metrics.get(metric), self._above[metric]
            if value is None:
                continue
            if value <= limit:
                above.clear()
                continue
            above.append(step)
            if len(above) >= self._steps:
                divergence = divergence or Divergence(metric, limit, above[0], value)
        return divergence
