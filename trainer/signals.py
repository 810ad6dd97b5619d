"""Stopping early by signal.

The first SIGTERM, SIGUSR1 or Ctrl-C lets the current step finish; then the run saves and exits with status 75
(`EX_TEMPFAIL`: the same command continues). A second signal stops the run without a save, which is as safe as a
kill. A third signal ends the process immediately. Before the first step, and after the last, there is nothing to
save, and the first signal stops the run directly.

This module imports only the standard library, because the handlers are installed before any other import.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

EXIT_STATUS = 75
INTERRUPTED_STATUS = 130
HANDLED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_AGAIN = "the same command with trainer.resume_mode=latest continues the run"


class Stopped(BaseException):
    """The run stopped early because a signal or a deadline asked for it.

    Not an `Exception`: a signal can arrive inside library code that handles every `Exception`.
    """


class Signals:
    """The signals that this process has received. One object serves the process: `SIGNALS`."""

    def __init__(self) -> None:
        self.first: str | None = None
        """Name of the first signal; None: no signal has arrived."""
        self._count = 0
        self._raised = 0  # signals that an exception was raised for
        self._held = 0
        self._in_steps = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals while the block runs. Does nothing on other threads than the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._on_signal) for number in HANDLED}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            self.first, self._count, self._raised = None, 0, 0

    def reinstall(self) -> None:
        """Install the handlers again, because a library has installed its own at a level below Python."""
        for number in HANDLED:
            signal.signal(number, signal.getsignal(number))

    @staticmethod
    def ignore() -> None:
        """Ignore all further signals: the run has ended, and a late signal must not change its exit status."""
        for number in HANDLED:
            signal.signal(number, signal.SIG_IGN)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Record signals that arrive while the block runs, and raise them after the block.

        Use it for calls that an exception must not interrupt. Ray, for example, turns the exception into a SystemError.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
        self.check()

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """Let the first signal wait for the end of the step while the block runs (see `run.stopping.StopRequest`)."""
        self._in_steps = True
        try:
            yield
        finally:
            self._in_steps = False
            self._raised = max(self._raised, min(self._count, 1))  # the steps have handled the first signal

    def check(self) -> None:
        """Raise the exception that a signal asks for, once for each signal. Does nothing on other threads.

        Raises:
            Stopped: the first signal arrived outside of the steps.
            KeyboardInterrupt: a second signal arrived.
        """
        if self._held or threading.current_thread() is not threading.main_thread():
            return
        if self._count <= self._raised or (self._count == 1 and self._in_steps):
            return
        self._raised = self._count
        if self._count > 1:
            raise KeyboardInterrupt(self.first)
        raise Stopped(f"stopped by {self.first} outside of training; {_AGAIN}")

    def _on_signal(self, number: int, _: object) -> None:
        self._count += 1
        self.first = self.first or signal.Signals(number).name
        if self._count > 2:
            _say(f"{signal.Signals(number).name} for the third time: ending without cleaning up")
            os._exit(INTERRUPTED_STATUS)
        if self._count == 1 and self._in_steps:
            _say(f"{self.first}: finishing this step, then saving and stopping; repeat it to stop without a save")
        self.check()


SIGNALS = Signals()


def _say(text: str) -> None:
    """Print from a signal handler, without the buffered streams, which may be in use."""
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode())
