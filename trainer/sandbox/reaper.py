"""The reaper of a process that runs user code: it ends whatever that code has started.

The reaper runs no user code. When the worker ends, when the driver asks for it (SIGTERM), or when the driver is gone,
the reaper ends all processes below it, daemons too: the kernel gives orphans to the nearest "subreaper" above them,
which is the worker, and then the reaper.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import resource
import signal
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import psutil

from trainer.process.log_setup import guard_output

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SPARING_ATTEMPTS = range(11, 301)
_AWAITED = {signal.SIGCHLD, signal.SIGTERM}


def main(driver: int, pipe: int, serve: str, arguments: list[Any]) -> NoReturn:
    """Be the reaper of one worker of the process `driver`, which calls `serve` (see `SandboxedProcess`) with its end of
    the pipe. End with the worker's exit code."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGCHLD)  # the death of the driver wakes the reaper
    reaper = os.getpid()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)  # before the worker can be heard of
    worker = os.fork()
    if worker == 0:
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            _work(Connection(pipe), reaper, serve, arguments)
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
    while True:
        process, status = os.waitpid(-1, os.WNOHANG)
        if process == worker:
            return os.waitstatus_to_exitcode(status)
        if process != 0:
            continue  # an orphan that the reaper has inherited
        if os.getppid() != driver:
            return 0
        signalled = signal.sigtimedwait(_AWAITED, 0.5)
        if signalled is not None and signalled.si_signo == signal.SIGTERM:
            return 0


def _end_children() -> None:
    """Kill the children until there are none. Children of a killed process become children of this one.

    Python's own processes that free the shared memory of others may end by themselves, for a while. Processes that fork
    faster than they are killed one by one are killed with their groups, which the kernel does at once: so a group with
    such a process of Python's is spared for that while.
    """
    for attempt in range(1000):
        try:
            while os.waitpid(-1, os.WNOHANG)[0] != 0:
                pass
        except ChildProcessError:
            return
        spared = {os.getpgrp()}
        for process in psutil.Process().children(recursive=True) if attempt in _SPARING_ATTEMPTS else ():
            with contextlib.suppress(ProcessLookupError):
                spared |= {os.getpgid(process.pid)} if is_tracker(process) else set()
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                if attempt >= _SPARING_ATTEMPTS.stop or not is_tracker(child):
                    child.kill()
                    if attempt >= _SPARING_ATTEMPTS.start and (group := os.getpgid(child.pid)) not in spared:
                        os.killpg(group, signal.SIGKILL)
        time.sleep(0.01)


def is_tracker(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return any("resource_tracker" in word for word in process.cmdline())
    return False


def _work(pipe: Connection, reaper: int, serve: str, arguments: list[Any]) -> None:
    """Be the worker: prepare this process for user code, and serve."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != reaper:  # it died before that took effect
        os._exit(1)
    os.setsid()  # `kill 0` in user code must not reach the reaper
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # if memory runs out, the kernel kills this process before driver, ranks and engines
    guard_output()
    module, _, function = serve.partition(":")
    getattr(importlib.import_module(module), function)(pipe, *arguments)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
