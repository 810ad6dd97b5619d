"""The results of the saves of this process."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from trainer.checkpoint.manager import SaveResult
from trainer.errors import UserError
from trainer.run.schedule import SaveSchedule

LOG = logging.getLogger(__name__)


class SaveTracker:
    """Logs the result of each save, and ends the run if too many saves fail in a row.

    Args:
        schedule: receives the cost of each save.
    """

    def __init__(self, ckpt_path: str, failures_allowed: int, schedule: SaveSchedule):
        self._ckpt_path = ckpt_path
        self._allowed = failures_allowed
        self._schedule = schedule
        self._failures = 0
        self.failure = ""
        """Why the last failed save failed."""
        self.last_good = ""
        """The newest checkpoint that this process has committed."""
        self.seconds = 0.0
        """Seconds from begin to commit of the last save."""
        self.blocked_s = 0.0
        """Seconds that training has waited for the save under way."""
        self.begun: int | None = None
        """The step of the newest save, unless it has failed."""

    def collect(self, results: Sequence[SaveResult], last: bool = False) -> None:
        """Log the results of saves, and count the failures.

        Args:
            last: the results are tries of the last save of this process. They do not count as too many failures.

        Raises:
            UserError: more saves failed in a row than `trainer.ckpt_failures_allowed`.
        """
        for result in results:
            if result.error is None:
                self._failures = 0
                self.last_good = result.path
                self.seconds = result.seconds
                self._schedule.measured(self.blocked_s, result.seconds)
            else:
                self._record_failure(result.step, result.error, last)

    def _record_failure(self, step: int, error: str, last: bool) -> None:
        self._failures += 1
        self.failure = error
        if self.begun == step:
            self.begun = None
        message = f"the checkpoint of step {step} FAILED ({error}); the last good one is {self.last_good or 'none yet'}"
        if self._failures > self._allowed and not last:
            raise UserError(
                f"trainer.ckpt_path={self._ckpt_path}: {message}; {self._failures} failed in a row, "
                f"trainer.ckpt_failures_allowed={self._allowed}"
            )
        LOG.warning(message if last else f"{message}; training continues")
