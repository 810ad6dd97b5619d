"""The start-up stages of a job, until its first step."""

from __future__ import annotations

import logging
import threading
import time

from trainer.metrics.timing import clock
from trainer.process import time_limits
from trainer.process.log_setup import escape
from trainer.process.signals import SIGNALS
from trainer.process.startup import running_stage

LOG = logging.getLogger(__name__)


class StartUp:
    """Logs each stage that takes more than some seconds (see `trainer.process.startup`). A context manager."""

    def __init__(self, enabled: bool = True):
        self._enabled = enabled
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._show, name="start-up display", daemon=True)

    def __enter__(self) -> StartUp:
        if self._enabled:
            with SIGNALS.blocked():
                self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._enabled:
            self._is_over.set()
            self._thread.join()

    def _show(self) -> None:
        announced = None
        while not self._is_over.wait(time_limits.POLL_INTERVAL_S):
            stage = running_stage()
            if stage not in (None, announced) and time.monotonic() - stage[1] > time_limits.LONG_STAGE_S:
                announced = stage
                LOG.info("%s …", stage[0])


def stage_text() -> str:
    """Return the running stage and its time so far, as `starting Ray 0:04`. Empty between stages. Thread-safe."""
    stage = running_stage()
    return f"{escape(stage[0], lines=False)} {clock(time.monotonic() - stage[1])}" if stage else ""
