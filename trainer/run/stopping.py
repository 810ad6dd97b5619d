"""When a run stops early: after a signal, or before a deadline."""

from __future__ import annotations

import os
import time
from datetime import datetime

from trainer.signals import SIGNALS


class StopRequest:
    """Whether, and why, the run should stop after the current step.

    Args:
        stop_at: ISO 8601 time; None takes the end of the Slurm job, where there is one.
    """

    def __init__(self, stop_at: str | None):
        self._deadline: float | None = None
        self._asked: str | None = None
        slurm = os.environ.get("SLURM_JOB_END_TIME")
        if stop_at is not None:
            self._deadline, self._source = datetime.fromisoformat(stop_at).timestamp(), f"trainer.stop_at={stop_at}"
        elif slurm and slurm.isdigit():
            self._deadline, self._source = float(slurm), "the end of the Slurm job"

    @property
    def reason(self) -> str | None:
        """Why the run should stop; None: it should not."""
        return SIGNALS.first or self._asked

    def ask(self, reason: str) -> None:
        """Ask to stop after the current step."""
        self._asked = reason

    def consider_deadline(self, seconds_needed: float) -> None:
        """Ask to stop if another step and a save, `seconds_needed`, would not end before the deadline."""
        if self._deadline is not None and time.time() + seconds_needed > self._deadline:
            self.ask(self._source)
