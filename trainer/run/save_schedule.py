"""The saves of a run: when they are due, and how they ended."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from trainer.checkpoint.manager import SaveResult
from trainer.errors import NotSavedError, UserError
from trainer.process.signals import CONTINUES

LOG = logging.getLogger(__name__)
_LAST_TRIES = 4
MEAN_TIME_BETWEEN_FAILURES_S = 4 * 3600.0
"""What `auto` expects."""


class SaveSchedule:
    """Save every N steps, or at Young's optimal interval (`auto`).

    Args:
        interval: number of steps, -1 (do not save by steps) or `auto`.
    """

    def __init__(self, interval: int | str):
        self._interval = interval
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
        if self._interval == "auto":
            return time.monotonic() - self._last >= self.best_interval_s()
        assert isinstance(self._interval, int)
        return self._interval > 0 and step % self._interval == 0

    def best_interval_s(self) -> float:
        """Return sqrt(2 C M) (Young, 1974), with C the cost of a save in seconds and M the mean time between failures.

        The interval is at least twice the duration of a save, because only one save is under way at a time. Before the
        first save C is unknown and counts as 0, so the first save is due immediately: it is worth the most.
        """
        return max(math.sqrt(2 * self._cost_s * MEAN_TIME_BETWEEN_FAILURES_S), 2 * self._duration_s)


FAILURES_ALLOWED = 3
"""Saves in a row that may fail before the run stops. Until then training continues."""


class SaveTracker:
    """Logs the result of each save, and ends the run if too many saves fail in a row.

    Args:
        schedule: receives the cost of each save.
    """

    def __init__(self, ckpt_path: str, schedule: SaveSchedule):
        self._ckpt_path = ckpt_path
        self._schedule = schedule
        self._failures = 0
        self.failure = ""
        """Why the last failed save failed."""
        self.last_good = ""
        """The newest checkpoint that this process has committed."""
        self.seconds = 0.0
        """Seconds from begin to commit of the last save."""
        self._blocked_s: Counter[int] = Counter()  # by the steps of saves
        self.begun: int | None = None
        """The step of the newest save, unless it has failed."""

    def add_blocked(self, step: int | None, seconds: float) -> None:
        """Count seconds that training has waited for the save of `step`; None: there is none."""
        if step is not None:
            self._blocked_s[step] += seconds  # type: ignore[assignment]

    @contextlib.contextmanager
    def blocking(self, step: int | None) -> Iterator[None]:
        """Count the time of the block as time that training waits for the save of `step`."""
        started = time.monotonic()
        yield
        self.add_blocked(step, time.monotonic() - started)

    def collect(self, results: Sequence[SaveResult], last: bool = False) -> None:
        """Log the results of saves, and count the failures.

        Args:
            last: the results are tries of the last save of this process. They do not count as too many failures.

        Raises:
            UserError: more than `FAILURES_ALLOWED` saves failed in a row.
        """
        for result in results:
            blocked_s = self._blocked_s.pop(result.step, 0.0)
            if result.error is None:
                self._failures = 0
                self.last_good = result.path
                self.seconds = result.seconds
                self._schedule.measured(blocked_s, result.seconds)
            else:
                self._record_failure(result.step, result.error, last)

    def save_last(self, step: int, save: Callable[[], None]) -> None:
        """Save the last state of this process; try again if that fails.

        Args:
            save: saves `step`, waits until that has ended, and lets this object collect the result.

        Raises:
            NotSavedError: every try failed.
        """
        import tenacity  # seldom needed, and slow to import

        for attempt in tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(NotSavedError),
            stop=tenacity.stop_after_attempt(_LAST_TRIES),
            wait=tenacity.wait_exponential(multiplier=0.5),
            reraise=True,
        ):
            with attempt:
                save()
                if self.begun != step:
                    raise NotSavedError(
                        f"step {step} is trained but not saved: trainer.ckpt_path={self._ckpt_path}: {self.failure}; "
                        f"the last good checkpoint is {self.last_good or 'none yet'}. Repair that, then give the same "
                        "command with trainer.resume_mode=latest: it trains again what is not saved."
                    )

    def _record_failure(self, step: int, error: str, last: bool) -> None:
        self._failures += 1
        self.failure = error
        if self.begun == step:
            self.begun = None
        message = f"the checkpoint of step {step} FAILED ({error}); the last good one is {self.last_good or 'none yet'}"
        if self._failures > FAILURES_ALLOWED and not last:
            raise UserError(
                f"trainer.ckpt_path={self._ckpt_path}: {message}; {self._failures} failed in a row; free space on "
                f"the disk, or repair it, and then {CONTINUES}"
            )
        LOG.warning(message if last else f"{message}; training continues")
