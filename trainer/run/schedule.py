"""When to save."""

from __future__ import annotations

import math
import time


class SaveSchedule:
    """By steps, by minutes, or by what saves cost and failures would.

    Args:
        interval: steps, -1 or `auto`.
        minutes: -1, or save also after so many.
        mean_time_between_failures: minutes.
    """

    def __init__(self, interval: int | str, minutes: float, mean_time_between_failures: float):
        self._interval = interval
        self._minutes = minutes
        self._mtbf_s = mean_time_between_failures * 60
        self._last = time.monotonic()
        self._cost_s = 0.0
        self._duration_s = 0.0

    @property
    def enabled(self) -> bool:
        """Whether anything is saved."""
        return self._interval != -1 or self._minutes > 0

    def measured(self, blocked_s: float, duration_s: float) -> None:
        """A save has ended: seconds that training stood still for it, and from its begin to its commit."""
        self._cost_s = max(blocked_s, self._cost_s / 2)  # forget an outlier within a few saves
        self._duration_s = duration_s

    def saved(self) -> None:
        """A save has begun."""
        self._last = time.monotonic()

    def due(self, step: int) -> bool:
        """Save after `step`?"""
        elapsed = time.monotonic() - self._last
        if self._interval == "auto":
            return elapsed >= self.best_interval_s()
        assert isinstance(self._interval, int)
        by_steps = self._interval > 0 and step % self._interval == 0
        return by_steps or (self._minutes > 0 and elapsed >= 60 * self._minutes)

    def best_interval_s(self) -> float:
        """sqrt(2 C M) of Young (1974), with C the seconds that a save costs training and M the mean time
        between failures; never below the time that a save takes, since only one is under way at a time.

        Before the first save C is unknown, and the first checkpoint is worth most: at once.
        """
        return max(math.sqrt(2 * self._cost_s * self._mtbf_s), 2 * self._duration_s)
