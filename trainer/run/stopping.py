"""The early stop of a run: after a signal, or before a deadline."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import datetime

from trainer.process.signals import SIGNALS

OnStep = Callable[[dict[str, float]], bool]
"""Called with the metrics of a finished step and `step`; returns whether to stop the run after this step."""


class StopRequest:
    """Whether, and why, the run should stop after the current step. Without a `deadline` (an ISO 8601 time), it stops
    before the end of the Slurm job, if it is one. `on_step` is the user's."""

    def __init__(self, deadline: str | None, on_step: OnStep | None = None):
        self._on_step = on_step
        self._deadline: float | None = None
        self._asked: str | None = None
        slurm = os.environ.get("SLURM_JOB_END_TIME")
        if deadline is not None:
            self._deadline, self._source = datetime.fromisoformat(deadline).timestamp(), f"trainer.deadline={deadline}"
        elif slurm and slurm.isdigit():
            self._deadline, self._source = float(slurm), "the end of the Slurm job"

    @property
    def reason(self) -> str | None:
        """The reason to stop; None: continue."""
        return SIGNALS.first or self._asked

    def ask(self, reason: str) -> None:
        """Ask to stop after the current step."""
        self._asked = reason

    def consider(self, metrics: dict[str, float], seconds_needed: float) -> None:
        """Ask to stop if the user's callback says so, or if another step and a save, together `seconds_needed`, would
        end after the deadline. `metrics`: of the finished step, with `step`."""
        if self._on_step is not None and self._on_step(metrics):
            self.ask("on_step returned true")
        if self._deadline is not None and time.time() + seconds_needed > self._deadline:
            self.ask(self._source)
