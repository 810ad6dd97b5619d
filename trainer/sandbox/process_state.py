"""The state of a process that runs user code, which is restored after each call."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import threading
import time
from _signal import getsignal  # fifteen times as fast as signal.getsignal, which looks for a name
from multiprocessing.connection import Connection

import psutil

from trainer.errors import one_line
from trainer.sandbox import limits
from trainer.sandbox.reaper import is_tracker


class ProcessState:
    """The state of the process after the imports, which is restored after each call of user code."""

    def __init__(self, pipe: Connection):
        self._directory = os.getcwd()
        self._environment = dict(os.environ._data)  # comparing os.environ itself takes 50 times as long
        self._stdio = (sys.stdin, sys.stdout, sys.stderr)
        self._handlers = [(int(number), getsignal(number)) for number in signal.valid_signals()]
        self._blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        limits = {getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}
        self._limits = {limit: resource.getrlimit(limit) for limit in limits}
        self._umask = os.umask(0)
        os.umask(self._umask)
        self._files = {number: _identity(number) for number in (0, 1, 2, pipe.fileno())}
        self._threads = threading.active_count()
        self._helpers = {child.pid for child in psutil.Process().children()}

    def restore(self) -> bool:
        """Undo the changes of the last call. Return whether the process can be used again."""
        try:
            signal.setitimer(signal.ITIMER_REAL, 0)  # a pending alarm
            for number, handler in self._handlers:
                if getsignal(number) is not handler:
                    signal.signal(number, handler)
            if signal.pthread_sigmask(signal.SIG_BLOCK, ()) != self._blocked:
                signal.pthread_sigmask(signal.SIG_SETMASK, self._blocked)
            for limit, values in self._limits.items():
                if resource.getrlimit(limit) != values:
                    resource.setrlimit(limit, values)
            os.umask(self._umask)
            if os.environ._data != self._environment:
                os.environb.clear()
                os.environb.update(self._environment)
            sys.stdin, sys.stdout, sys.stderr = self._stdio
            if any(stream.closed for stream in self._stdio):
                return False
            os.chdir(self._directory)
            files = {number: _identity(number) for number in self._files}
            return files == self._files and threading.active_count() <= self._threads + limits.THREADS_LEFT
        except Exception:  # a directory that is gone, a hard limit that was lowered, a closed descriptor
            return False

    def processes_left(self) -> str:
        """Return the name of a process that the last call has started and that still runs; empty if there is none."""
        end = time.monotonic() + limits.GRACE_PERIOD_S
        while _has_children():
            running = [child for child in psutil.Process().children() if self._is_left(child)]
            if not running:
                break
            if time.monotonic() > end:
                with contextlib.suppress(psutil.Error):
                    return one_line(running[0].name()) or "?"
            time.sleep(0.02)
        return ""

    def _is_left(self, child: psutil.Process) -> bool:
        if child.pid in self._helpers:
            return False
        with contextlib.suppress(psutil.Error):
            if child.status() == psutil.STATUS_ZOMBIE:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(child.pid, os.WNOHANG)
                return False
            if is_tracker(child):  # it ends with its parent
                self._helpers.add(child.pid)
                return False
            return True
        return False  # it has just ended


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino
