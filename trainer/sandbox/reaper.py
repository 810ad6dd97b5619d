"""The guard of a process that runs user code, and the state of that process, which it restores after each call.

The guard runs no user code. When the worker ends, when the driver asks for it (SIGTERM), or when the driver is gone,
the guard ends all processes below it, daemons too: the kernel gives orphans to the nearest "subreaper" above them,
which is the worker, and then the guard.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import resource
import signal
import sys
import threading
import time
import traceback
from _signal import getsignal  # fifteen times as fast as signal.getsignal, which looks for a name
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import psutil

from trainer.errors import one_line
from trainer.process.log_setup import guard_output
from trainer.sandbox import limits

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def main(driver: int, pipe: int, serve: str, arguments: list[Any]) -> NoReturn:
    """Be the guard of one worker, which calls `serve`. End with the worker's exit code.

    Args:
        driver: the process to serve.
        pipe: descriptor of the worker's end of the pipe to it.
        serve: a function `module:function` that is called with the `Connection` of that pipe and the arguments.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGCHLD)  # the death of the driver wakes the guard
    guard = os.getpid()
    worker = os.fork()
    if worker == 0:
        try:
            _work(Connection(pipe), guard, serve, arguments)
        except OSError:  # the pipe to the driver is closed
            pass
        except BaseException:
            traceback.print_exc()
        finally:  # without exit handlers and threads of user code
            os._exit(1)
    os.close(pipe)
    code = _wait_for(worker, driver)
    _end_children()
    os._exit(code if code >= 0 else 128 - code)


def _wait_for(worker: int, driver: int) -> int:
    """Return the worker's exit code (negative: a signal) once it ends, or 0 once it is no longer needed."""
    awaited = {signal.SIGCHLD, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    while True:
        process, status = os.waitpid(-1, os.WNOHANG)
        if process == worker:
            return os.waitstatus_to_exitcode(status)
        if process != 0:
            continue  # an orphan that the guard has inherited
        if os.getppid() != driver:
            return 0
        signalled = signal.sigtimedwait(awaited, 0.5)
        if signalled is not None and signalled.si_signo == signal.SIGTERM:
            return 0


def _end_children() -> None:
    """Kill the children until there are none. Children of a killed process become children of this one."""
    for _ in range(1000):
        try:
            while os.waitpid(-1, os.WNOHANG)[0] != 0:
                pass
        except ChildProcessError:
            return
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error):
                child.kill()
        time.sleep(0.01)


def _work(pipe: Connection, guard: int, serve: str, arguments: list[Any]) -> None:
    """Be the worker: prepare this process for user code, and serve."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guard:  # it died before that took effect
        os._exit(1)
    os.setsid()  # `kill 0` in user code must not reach the guard
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # if memory runs out, the kernel kills this process before driver, ranks and engines
    guard_output()
    module, _, function = serve.partition(":")
    getattr(importlib.import_module(module), function)(pipe, *arguments)


def send(pipe: Connection, message: Any) -> None:
    """Send `message` to the driver, as JSON."""
    pipe.send_bytes(json.dumps(message).encode())


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
            if resource_tracker.__name__ in " ".join(child.cmdline()):  # Python's own, which ends with its parent
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


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
