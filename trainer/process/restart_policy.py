"""The policy that decides whether processes are restarted after a failure, or the run ends."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.errors import NonFiniteError, NonRetryableError, UserError, WorkerError, failure_source_of
from trainer.process import time_limits
from trainer.process.failure_log import JOB, classify

_NOT_RECOVERABLE = ("cluster", "restart_limit", "server_absent")


@dataclass(frozen=True)
class Decision:
    """What to do after a failure."""

    delay_s: float = 0.0
    """Seconds to wait before the restart."""
    refusal: str = ""
    """Why there is no restart. Empty: restart."""
    repeated: bool = False
    """The run itself is at fault: its step failed again in the same way."""


class Restarts:
    """Counts the restarts of processes with the same role. Uses neither processes nor clocks.

    Args:
        limit: largest number of restarts within the window (`trainer.max_restarts`).
        window_s: length of the window.
    """

    def __init__(self, limit: int, window_s: float):
        self._limit = limit
        self._window_s = window_s
        self._times: list[float] = []
        self._faults: set[tuple[int, str]] = set()
        self.count = 0
        """Restarts so far."""

    def decide(self, error: Exception, step: int, now: float) -> Decision:
        """Return the decision after `error`. A restart counts from now on.

        Args:
            step: the step during which the error happened.
            now: seconds on a monotonic clock.
        """
        if not can_recover(error):
            return Decision(refusal="a restart does not help")
        failure_class, cause = classify(error)
        if failure_class == JOB and (step, cause) in self._faults:
            return Decision(refusal=f"step {step} failed again in the same way when it was repeated", repeated=True)
        self._times = [time for time in self._times if now - time < self._window_s]
        if len(self._times) >= self._limit:
            return Decision(refusal=f"{len(self._times)} restarts within {self._window_s / 60:g} minutes are the limit")
        if failure_class == JOB:
            self._faults.add((step, cause))
        delay = time_limits.RESTART_FIRST_DELAY_S * 2 ** (len(self._times) - 1) if self._times else 0.0
        self._times.append(now)
        self.count += 1
        return Decision(min(delay, time_limits.RESTART_LONGEST_DELAY_S))


def can_recover(error: Exception) -> bool:
    """Return whether new processes can help: the failure came from one of them, and not from the driver."""
    if isinstance(error, (UserError, NonRetryableError)):
        return False
    if isinstance(error, WorkerError) and error.cause in _NOT_RECOVERABLE:
        return False
    return isinstance(error, NonFiniteError) or failure_source_of(error) is not None
