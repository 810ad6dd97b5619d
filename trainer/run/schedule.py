"""The schedule of the saves."""

from __future__ import annotations

import math
import time


class SaveSchedule:
    """Save every N steps, every N minutes, or at Young's optimal interval (`auto`).

    Args:
        interval: number of steps, -1 (do not save by steps) or `auto`.
        minutes: number of minutes, or -1 (do not save by minutes).
        mean_time_between_failures: minutes, for `auto`.
    """

    def __init__(self, interval: int | str, minutes: float, mean_time_between_failures: float):
        self._interval = interval
        self._minutes = minutes
        self._mtbf_s = mean_time_between_failures * 60
        self._last = time.monotonic()
        self._cost_s = 0.0
        self._duration_s = 0.0

    def measured(self, blocked_s: float, duration_s: float) -> None:
        """Record the cost of a save: seconds that training waited for it, and seconds from its begin to its commit."""
        self._cost_s = max(blocked_s, self._cost_s / 2)  # halving forgets an outlier within a few saves
        self._duration_s = duration_s

    def saved(self) -> None:
        """Record that a save has begun."""
        self._last = time.monotonic()

    def due(self, step: int) -> bool:
        """Return whether to save after `step`."""
        elapsed = time.monotonic() - self._last
        if self._interval == "auto":
            return elapsed >= self.best_interval_s()
        assert isinstance(self._interval, int)
        by_steps = self._interval > 0 and step % self._interval == 0
        return by_steps or (self._minutes > 0 and elapsed >= 60 * self._minutes)

    def best_interval_s(self) -> float:
        """Return sqrt(2 C M) (Young, 1974), with C the cost of a save in seconds and M the mean time between failures.

        The interval is at least twice the duration of a save, because only one save is under way at a time. Before the
        first save C is unknown and counts as 0, so the first save is due immediately: it is worth the most.
        """
        return max(math.sqrt(2 * self._cost_s * self._mtbf_s), 2 * self._duration_s)
