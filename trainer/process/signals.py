"""Stopping early by signal.

During training, the first SIGTERM, SIGUSR1 or Ctrl-C lets the current step finish; then the run saves and stops. A
second signal stops the run without a save, which is as safe as a kill. Before the first step, and after the last one,
there is nothing to save, and the first signal stops the run directly. In all these cases the exit status is 75
(`EX_TEMPFAIL`: the same command continues). A third signal ends the process immediately, also with 75. If a long call
of a C function keeps the process from handling signals, a separate process kills it (`process.signal_watch`).

A handler only records its signal. The exception is raised at the next safe point (`check`), because libraries may
swallow or replace an exception that a handler raises. A download or an import has no safe point: after
`SIGNAL_GRACE_S` seconds the exception is raised at any point of the main thread.

This module imports very little, because the handlers are installed before any other import.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from trainer.errors import WorkerError
from trainer.process import signal_watch, time_limits

EXIT_STATUS = 75
HANDLED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
CONTINUES = "the same command with trainer.resume_mode=latest continues the run"

_MOMENTS = {
    "starting": "before the first step of this start, so nothing is lost",
    "restarting": "while the ranks restarted: the last checkpoint is unchanged",
    "ending": "after the last step",
}


class Stopped(BaseException):
    """The run stopped early because a signal or a deadline asked for it.

    Not an `Exception`: it can be raised inside library code that handles every `Exception`.
    """


class Progress(NamedTuple):
    """How a job gets on."""

    status: str
    """`starting`, `training`, `restarting`, `ending`, or `stalled`: then the job is about to end itself."""
    age_s: float  # seconds since the driver last made progress
    limit_s: float | None = None
    """The age from which the job counts as stalled; None: no limit holds now."""


class Signals:
    """The signals that this process has received. There is one object for the process: `SIGNALS`."""

    def __init__(self) -> None:
        self.safe_points = 0
        """Number of safe points that the main thread has passed. If it does not change, the main thread may hang."""
        self.is_waiting = False  # whether the main thread is in a `waiting` block
        self.trains = True  # whether this process trains a run, which the same command continues
        self._passed_behind = 0  # safe points of other threads
        self._seen_behind = 0  # the same at the last `check_behind`
        self._deferred = 0
        self.watching_process: int | None = None
        """The process that watches this one, if there is one (see `_start_watch`)."""
        self._watch_pipe = -1
        self._forget()

    def _forget(self) -> None:
        """Begin without a signal: what the signals of a run have set must not reach the next run of this process."""
        self.first: str | None = None  # name of the first signal, or None if no signal has arrived
        self.raised: BaseException | None = None
        """The exception that a signal has raised. It is raised only once, so later signals do not disturb the exit."""
        self.count = 0  # number of signals so far
        self._handled = 0  # number of signals that the training loop has handled
        self._last_s = 0.0
        self._is_listening = False
        self.moment = "starting"
        """What the job does: `starting`, `training`, `restarting` or `ending`. From a restart until the next step
        begins, a signal ends the run without a save."""

    def listen(self) -> None:
        """Record the signals until the process exits. An entry point calls this before it imports other modules. No
        exception is raised before `listening` begins, because exceptions are handled there."""
        open_standard_streams()
        for number in HANDLED:
            signal.signal(number, self._on_signal)
        # On the alarm, the main thread has reached no safe point: the exception is raised wherever it is.
        signal.signal(signal.SIGALRM, lambda *_: self.check())
        if self.watching_process is None:
            self._start_watch()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals while the block runs. Does nothing on threads other than the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handlers = {number: signal.getsignal(number) for number in (*HANDLED, signal.SIGALRM)}
        is_watched = self.watching_process is not None
        self.listen()
        self._is_listening = True
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            if not is_watched:
                self.end_watch()
            self._forget()

    def reinstall(self) -> None:
        """Install the handlers again. Call it after a library has changed them at the C level."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in HANDLED:
            signal.signal(number, signal.getsignal(number))

    @staticmethod
    def ignore() -> None:
        """Ignore all further signals: the run has ended, and a late signal must not change its exit status. The
        watching process still counts them: the last line of output may block on a stopped terminal."""
        for number in HANDLED:
            signal.signal(number, lambda *_: None)
        signal.signal(signal.SIGALRM, signal.SIG_IGN)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Defer signals that arrive while the block runs until its end. Use it for calls that an exception must not
        interrupt. Ray, for example, turns the exception into a SystemExit."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._deferred += 1
        try:
            yield
        finally:
            self._deferred -= 1
        self.check()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Declare that the block may take long without a safe point: it waits for storage or has its own time limit.
        Does nothing on threads other than the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        outer, self.is_waiting = self.is_waiting, True
        try:
            yield
        finally:
            self.is_waiting = outer
            self.safe_points += 1

    @staticmethod
    @contextmanager
    def blocked() -> Iterator[None]:
        """Block signals on this thread, and on threads and processes that start while the block runs.

        The kernel delivers a signal to any thread that does not block it. While Ray starts, Ray's handler is installed,
        and it ends the process. So every thread that is older than Ray must block the signals.
        """
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, (*HANDLED, signal.SIGALRM))
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    @contextmanager
    def in_training_loop(self) -> Iterator[None]:
        """Defer the first signal to the end of the step while the block runs (see `run.state.StopRequest`)."""
        self.moment = "training"
        try:
            yield
        finally:
            self.moment = "ending"
            self._handled = max(self._handled, min(self.count, 1))  # the training loop has handled the first signal

    def check(self, is_progress: bool = True) -> None:
        """Raise the exception that a signal requests, once. A safe point. On other threads it is only counted. Without
        `is_progress`, the main thread waits for another thread that may hang.

        Raises:
            Stopped: the first signal arrived outside the training loop.
            KeyboardInterrupt: a second signal arrived in the training loop.
        """
        if threading.current_thread() is not threading.main_thread():
            self._passed_behind += 1
            return
        self.safe_points += is_progress
        waits_for_step = self.moment == "training" and self.count == 1
        if self.count > self._handled and not (waits_for_step or self._deferred or self.raised):
            signal.setitimer(signal.ITIMER_REAL, 0)
            self.raised = self._exception()
            raise self.raised

    def check_behind(self) -> None:
        """Check while the main thread waits for another one, which calls `check`. It gets on only as far as that."""
        before, self._seen_behind = self._seen_behind, self._passed_behind
        self.check(is_progress=self._passed_behind != before)

    def stop_behind(self, error: BaseException) -> BaseException | None:
        """Return the exception of a signal if it explains `error`, otherwise None. A library may have replaced the
        exception. Or processes of the job may have died of a signal that this process received as well."""
        if error is self.raised:
            return None
        if self.raised is None and self.first and isinstance(error, WorkerError):
            if self.moment == "training":
                self.raised = Stopped(f"stopped by {self.first} in the middle of a step, since {error}; {CONTINUES}")
            else:
                self.raised = self._exception()
        return self.raised

    def _exception(self) -> BaseException:
        if not self.trains:
            return Stopped(f"stopped by {self.first}")
        if self.moment == "training":
            return KeyboardInterrupt(
                "stopped by a second signal: the steps since the last checkpoint are not saved, and the checkpoint is "
                f"unchanged; {CONTINUES}"
            )
        return Stopped(f"stopped by {self.first} {_MOMENTS[self.moment]}; {CONTINUES}")

    def _on_signal(self, number: int, _: object) -> None:
        now = time.monotonic()
        repeated = self.count > 0 and now - self._last_s < time_limits.SAME_REQUEST_S
        self._last_s = now
        if repeated:
            return
        self.count += 1
        self.first = self.first or signal.Signals(number).name
        if self.count > 2:
            _say(f"stopped by a third signal, without cleaning up; {CONTINUES}")
            os._exit(EXIT_STATUS)
        if self.count == 1 and self.moment == "training":
            _say(f"{self.first}: finishing this step, then saving and stopping; repeat it to stop without a save")
        elif self._is_listening:
            signal.setitimer(signal.ITIMER_REAL, time_limits.SIGNAL_GRACE_S, 1.0)

    def _start_watch(self) -> None:
        """Start the process that kills this one if it can no longer exit by itself (see `process.signal_watch`)."""
        reading, self._watch_pipe = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(reading, True)
        text = f"stopped by a third signal, which the process could not handle: killed {os.getpid()}; {CONTINUES}"
        handled = ",".join(str(int(number)) for number in HANDLED)
        limits = [str(time_limits.SAME_REQUEST_S), str(time_limits.SIGNAL_GRACE_S)]
        try:
            self.watching_process = os.posix_spawn(
                sys.executable,
                [sys.executable, "-I", "-S", signal_watch.__file__, str(os.getpid()), handled, *limits, text],
                os.environ,
                file_actions=[(os.POSIX_SPAWN_DUP2, reading, 0), (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)],
                setsid=True,  # it must not receive the signals to the process group
                # Nor die of those that a scheduler sends to each process of the job, or of its end before it has begun.
                setsigmask=(*HANDLED, signal_watch.END),
            )
        except (OSError, ValueError):  # no process can be started, or Python does not know its own path
            os.close(self._watch_pipe)
        else:
            signal.set_wakeup_fd(self._watch_pipe, warn_on_full_buffer=False)
        finally:
            os.close(reading)

    def end_with_this(self, pid: int) -> None:
        """Let a process be killed, with all that it has started, when this one has ended in any way."""
        if self.watching_process is not None:
            os.write(self._watch_pipe, bytes(128 | byte for byte in b"%d;" % pid))

    def end_watch(self) -> None:
        """End the watching process with those of `end_with_this`, so that they do not outlive this process."""
        if self.watching_process is not None:  # otherwise this process has been forked since
            watch, self.watching_process = self.watching_process, None
            signal.set_wakeup_fd(-1)
            os.close(self._watch_pipe)
            with contextlib.suppress(OSError):  # it was killed, and a library has reaped it
                os.kill(watch, signal_watch.END)
                os.waitpid(watch, 0)

    def _leave_watch(self) -> None:
        """Keep the signals of a forked process from being counted as signals of its parent."""
        if self.watching_process is not None:
            self.watching_process = None
            with contextlib.suppress(ValueError):
                signal.set_wakeup_fd(-1)


SIGNALS = Signals()
os.register_at_fork(after_in_child=SIGNALS._leave_watch)


def open_standard_streams() -> None:
    """Open what is closed of stdin, stdout and stderr, here and for processes that this one starts.

    Else the next file that is opened gets the number, and with it all that is printed: a pipe that tells of signals
    would take the output for signals.
    """
    for standard in range(3):
        try:
            os.fstat(standard)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest number that is free


def _say(text: str) -> None:
    """Print from a signal handler, without the buffered streams, which may be in use."""
    from trainer.process.log_setup import LOG_FILE  # not yet when the handlers are installed

    LOG_FILE.write(text)
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode())
