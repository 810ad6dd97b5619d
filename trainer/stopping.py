"""Leaving early with everything saved: signals and deadlines.

The first SIGTERM, SIGUSR1 or Ctrl-C lets the step that is under way finish; then the run saves and exits with
status 75 (`EX_TEMPFAIL`: the same command goes on). A second one leaves at once, which is as safe as a kill.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime

EXIT_STATUS = 75
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class Stopped(Exception):
    """The run has stopped early, as asked, with everything saved."""


class StopRequest:
    """Whether, and why, the run should stop after the current step.

    Args:
        stop_at: ISO 8601 time; None takes Slurm's end of the job, where there is one.
    """

    def __init__(self, stop_at: str | None):
        self.reason: str | None = None
        self._in_steps = False
        self._deadline: float | None = None
        slurm = os.environ.get("SLURM_JOB_END_TIME")
        if stop_at is not None:
            self._deadline, self._source = datetime.fromisoformat(stop_at).timestamp(), f"trainer.stop_at={stop_at}"
        elif slurm and slurm.isdigit():
            self._deadline, self._source = float(slurm), "the end of the Slurm job"

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Catch the signals, in the main thread, while the block runs."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """While the block runs a signal waits for the end of a step. Outside there is nothing to save yet, or
        nothing left to, and the first signal leaves at once."""
        self._in_steps = True
        try:
            yield
        finally:
            self._in_steps = False

    def _on_signal(self, number: int, _: object) -> None:
        name = signal.Signals(number).name
        if self.reason is not None:
            raise KeyboardInterrupt(name)
        self.reason = name
        if not self._in_steps:
            raise Stopped(f"stopped by {name} outside of training; the same command with trainer.resume_mode=latest "
                          "goes on")  # fmt: skip
        print(f"{name}: finishing this step, then saving and leaving; once more to leave at once", file=sys.stderr,
              flush=True)  # fmt: skip

    def consider_deadline(self, seconds_needed: float) -> None:
        """Ask to stop if another step and a save, `seconds_needed`, would not end before the deadline."""
        if self.reason is None and self._deadline is not None and time.time() + seconds_needed > self._deadline:
            self.reason = self._source
