"""How the saves of this process have ended."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from trainer.checkpoint.manager import Outcome
from trainer.errors import UserError
from trainer.run.schedule import SaveSchedule

LOG = logging.getLogger(__name__)


class SaveResults:
    """Tells the user how each save has ended, and ends the run when too many have failed in a row.

    Args:
        schedule: is told what saves cost.
    """

    def __init__(self, ckpt_path: str, failures_allowed: int, schedule: SaveSchedule):
        self._ckpt_path = ckpt_path
        self._allowed = failures_allowed
        self._schedule = schedule
        self._failures = 0
        self.failure = ""
        """Why the last failed save failed."""
        self.last_good = ""
        """The newest checkpoint that is known to be good."""
        self.seconds = 0.0
        """From begin to commit of the last save."""
        self.blocked_s = 0.0
        """Seconds that training has stood still for the save under way."""
        self.begun: int | None = None
        """The step of the newest save, unless it has failed."""

    def collect(self, outcomes: Sequence[Outcome], last: bool = False) -> None:
        """Tell how saves have ended.

        Args:
            last: these are tries of the last save of this process, which go on whatever has failed before.

        Raises:
            UserError: more of them failed in a row than `trainer.ckpt_failures_allowed`.
        """
        for outcome in outcomes:
            if outcome.error is None:
                self._failures = 0
                self.last_good = outcome.path
                self.seconds = outcome.seconds
                self._schedule.measured(self.blocked_s, outcome.seconds)
            else:
                self._record_failure(outcome.step, outcome.error, last)

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
