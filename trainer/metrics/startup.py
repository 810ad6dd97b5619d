"""The display of the start-up stages of a job, until its first step."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import threading
import time

from trainer.metrics.timing import clock
from trainer.process import time_limits
from trainer.process.log_setup import escape, messages_to
from trainer.process.signals import SIGNALS
from trainer.process.startup import running_stage

LOG = logging.getLogger(__name__)
_ERASE_LINE = "\r\x1b[2K"


class StartUp:
    """Shows the running stage (see `trainer.process.startup`). A context manager around a complete job.

    On a terminal: a line with a running clock. Elsewhere: one line for each stage that takes more than some seconds.
    While `trainer.metrics.progress.Progress` uses the terminal, it shows the stage.
    """

    running: StartUp | None = None
    """The running display of this process."""

    def __init__(self, enabled: bool = True):
        self._on_terminal = enabled and sys.stdout.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
        self._enabled = enabled
        self._is_paused = False
        self._announced: tuple[str, float] | None = None
        self._writing = threading.Lock()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._show, name="start-up display", daemon=True)

    def __enter__(self) -> StartUp:
        if self._enabled:
            StartUp.running = self
            with SIGNALS.blocked():
                self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._enabled:
            self._is_over.set()
            self._thread.join()
            StartUp.running = None

    def pause(self, is_paused: bool) -> None:
        """Leave the terminal to another display, or use it again."""
        with self._writing:
            self._is_paused = is_paused
            if self._on_terminal:
                _write(_ERASE_LINE)

    def _show(self) -> None:
        if self._on_terminal:
            with messages_to(self._print_message):
                while not self._is_over.wait(time_limits.POLL_INTERVAL_S):
                    self._draw()
            self.pause(True)
        else:
            while not self._is_over.wait(time_limits.POLL_INTERVAL_S):
                self._announce()

    def _draw(self) -> None:
        with self._writing:
            if not self._is_paused:
                _write(_ERASE_LINE + stage_text()[: shutil.get_terminal_size().columns - 1])

    def _print_message(self, text: str) -> None:
        with self._writing:
            print(text if self._is_paused else f"{_ERASE_LINE}{text}", flush=True)

    def _announce(self) -> None:
        stage = running_stage()
        if stage is not None and stage != self._announced and time.monotonic() - stage[1] > time_limits.LONG_STAGE_S:
            self._announced = stage
            LOG.info("%s …", stage[0])


def stage_text() -> str:
    """Return the running stage and its time so far, as `starting Ray 0:04`. Empty between stages. Thread-safe."""
    stage = running_stage()
    return f"{escape(stage[0], lines=False)} {clock(time.monotonic() - stage[1])}" if stage else ""


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
