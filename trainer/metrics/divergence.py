"""Whether a run has diverged: a metric is above its limit, and stays there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Divergence:
    """A metric that has run away."""

    metric: str
    limit: float
    first_step: int
    """The first of the steps in a row that were above the limit."""
    value: float
    """Of the last step."""

    def __str__(self) -> str:
        return (
            f"{self.metric} has been above {self.limit:g} since step {self.first_step}, and is {self.value:.4g} now "
            "(trainer.divergence_limits)"
        )


class DivergenceCheck:
    """Finds metrics that stay above their limits. Metrics alone decide, so a resumed run finds the same.

    Args:
        limits: by metric (`trainer.divergence_limits`).
        steps: so many steps in a row must be above the limit (`trainer.divergence_patience`).
        history: the lines of `metrics.jsonl` before the first `update`.
    """

    def __init__(self, limits: Mapping[str, float], steps: int, history: Iterable[Mapping[str, Any]] = ()):
        self._limits = limits
        self._steps = steps
        self._above: dict[str, list[int]] = {metric: [] for metric in limits}
        for row in history:
            self.update(row["step"], row)

    def update(self, step: int, metrics: Mapping[str, Any]) -> Divergence | None:
        """Count a finished step; return what has run away. A step that does not have a metric does not count for it."""
        found = None
        for metric, limit in self._limits.items():
            value, above = metrics.get(metric), self._above[metric]
            if value is None:
                continue
            if value <= limit:
                above.clear()
                continue
            above.append(step)
            if len(above) >= self._steps:
                found = found or Divergence(metric, limit, above[0], value)
        return found
