"""Checks of the metrics of a run while it trains: its advisories, and whether it has diverged.

Only metrics are used, so a resumed run gives the same answers.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.config import Config
from trainer.metrics.advice import Advisor

LOG = logging.getLogger(__name__)


class MetricChecks:
    """Logs each advisory once, and finds metrics that have diverged.

    Args:
        compares_completions: see `Advisor`.
        history: the lines of `metrics.jsonl` before the first `update`.
    """

    def __init__(self, cfg: Config, compares_completions: bool, history: Sequence[Mapping[str, Any]] = ()) -> None:
        t = cfg.trainer
        self._advisor = Advisor(dataclasses.asdict(cfg), compares_completions, history)
        self._divergence = DivergenceCheck(t.divergence_limits, history)

    def update(self, step: int, metrics: Mapping[str, Any]) -> Divergence | None:
        """Check the metrics of a finished step. Return the first metric that has diverged, or None."""
        for advice in self._advisor.update(step, metrics):
            LOG.info("NOTE: %s (more: docs/troubleshooting.md)", advice)
        return self._divergence.update(step, metrics)


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


PATIENCE = 3
"""Consecutive steps above a limit after which the run has diverged."""


class DivergenceCheck:
    """Finds metrics that stay above their limits.

    Args:
        limits: limits by metric (`trainer.divergence_limits`).
        history: the lines of `metrics.jsonl` before the first `update`.
    """

    def __init__(self, limits: Mapping[str, float], history: Iterable[Mapping[str, Any]] = ()):
        self._limits = limits
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
            if len(above) >= PATIENCE:
                divergence = divergence or Divergence(metric, limit, above[0], value)
        return divergence
