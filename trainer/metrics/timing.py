"""How long each phase of a step took."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from trainer.metrics.names import METRICS


class Timer:
    """Adds up seconds per phase until `take`. Different phases may nest; one phase may run several times.

    >>> timer = Timer()
    >>> with timer("step"):
    ...     with timer("rollout"):
    ...         pass
    >>> sorted(timer.take())
    ['time/rollout', 'time/step']
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._running: set[str] = set()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Time the block as `time/{phase}`, also when it raises."""
        name = f"time/{phase}"
        assert name in METRICS, f"{name} is not a metric"
        assert name not in self._running, f"{name} is running already: its seconds would count twice"
        self._running.add(name)
        start = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - start
            self._running.remove(name)

    def add(self, phase: str, seconds: float) -> None:
        """Count seconds that were measured elsewhere as `time/{phase}`."""
        name = f"time/{phase}"
        assert name in METRICS, f"{name} is not a metric"
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """Seconds of each phase that ended since the last call, as `time/{phase}`."""
        taken, self._seconds = self._seconds, {}
        return taken
