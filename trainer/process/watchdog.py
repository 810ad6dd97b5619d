"""Ends a job whose driver hangs in a library call, in storage or in user code; and limits the time of calls."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

from trainer.process import time_limits
from trainer.process.failures import INCIDENTS
from trainer.process.log_setup import LOG_FILE
from trainer.process.signals import CONTINUES, EXIT_STATUS, SIGNALS, Progress

_FINAL_ACTION_S = 5.0
_MARGIN_S = 30.0
"""Seconds beyond the limit after which the process ends even if its threads can run no Python."""


class StallDetector:
    """Measures how long the driver has passed no safe point. Uses neither threads nor clocks. A pause is limited to
    `hang_s`, and to `rpc_s` if the driver has waited for storage or for calls with time limits of their own."""

    def __init__(self, hang_s: float, rpc_s: float):
        self._hang_s = hang_s
        self._rpc_s = rpc_s
        self._safe_points = -1
        self._waits = False
        self.pause_s = 0.0  # length of the current pause, in seconds

    def update(self, seconds: float, safe_points: int, is_waiting: bool) -> bool:
        """Add `seconds` to the current pause. Return whether the driver hangs. It may wait for what takes long without
        progress, such as storage (`is_waiting`)."""
        if safe_points != self._safe_points:
            self._safe_points, self.pause_s, self._waits = safe_points, 0.0, False
        else:
            self.pause_s += seconds
            self._waits |= is_waiting
        return self.pause_s > self.limit_s

    @property
    def limit_s(self) -> float:
        """Longest allowed pause at this moment, in seconds."""
        return max(self._hang_s, self._rpc_s) if self._waits else self._hang_s


class Watchdog:
    """Ends the job if the main thread hangs within the steps: `with Watchdog(hang_s, rpc_s)`.

    The process exits as if it were killed, with status 75: the same command continues the run. Its ranks and engines
    exit with it. The stacks of all threads are printed on stderr. If the main thread holds the interpreter's lock, the
    thread of this object cannot run. Then a thread of `faulthandler` in C does the same, with status 1.
    """

    def __init__(self, hang_s: float, rpc_s: float):
        self._detector = StallDetector(hang_s, rpc_s)
        self._hang_s = hang_s
        self._seen = (SIGNALS.safe_points, time.monotonic())  # outside of the steps: when this number was new
        self._end = threading.Event()
        self._lock = threading.Lock()

    def __enter__(self) -> Watchdog:
        # Only the main thread has safe points.
        if threading.current_thread() is threading.main_thread():
            with SIGNALS.blocked():
                threading.Thread(target=self._run, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._end.set()
            faulthandler.cancel_dump_traceback_later()

    def progress(self) -> Progress:
        """Return how the job gets on. Any thread may ask. No limit holds outside of the steps."""
        moment, (safe_points, since) = SIGNALS.moment, self._seen
        if moment == "training":
            pause_s, limit_s = self._detector.pause_s, self._detector.limit_s
            return Progress("stalled" if pause_s > limit_s else moment, pause_s, limit_s)
        now = time.monotonic()
        if safe_points != SIGNALS.safe_points:
            self._seen, since = (SIGNALS.safe_points, now), now
        return Progress(moment, now - since)

    def _run(self) -> None:
        interval_s = min(time_limits.STALL_CHECK_INTERVAL_S, self._hang_s / 4)
        while not self._end.wait(interval_s):
            is_watched = SIGNALS.moment == "training"
            # Count intervals instead of reading the clock: the whole job may have been stopped for a while.
            hangs = is_watched and self._detector.update(interval_s, SIGNALS.safe_points, SIGNALS.is_waiting)
            if not is_watched:
                self.progress()  # notes the time
            with self._lock:
                if is_watched and not self._end.is_set():
                    limit_s = self._detector.limit_s + _MARGIN_S
                    faulthandler.dump_traceback_later(limit_s, exit=True, file=2)
                else:
                    faulthandler.cancel_dump_traceback_later()
            if hangs:
                self._end_job()

    def _end_job(self) -> None:
        step, pause_s = INCIDENTS.step, self._detector.pause_s
        text = f"the driver has made no progress for {pause_s:.0f} s in step {step}"
        hint = f"the job ends; its stacks are on stderr, the last checkpoint is unchanged, and {CONTINUES}"
        for action in (
            lambda: os.write(2, f"{text}: {hint}\n".encode()),
            lambda: LOG_FILE.write(f"{text}: {hint}"),
            lambda: faulthandler.dump_traceback(2),
            lambda: INCIDENTS.note("driver", "driver", "hanging driver", "ended the job", text),
        ):
            with contextlib.suppress(Exception):
                ends_within(action, _FINAL_ACTION_S)  # it may need what hangs
        os._exit(EXIT_STATUS)


def ends_within(action: Callable[[], object], limit_s: float) -> bool:
    """Call `action` on another thread, and return whether it ends within `limit_s` seconds. Raises Exception: what
    `action` has raised within this time."""
    failures: list[Exception] = []

    def call() -> None:
        try:
            action()
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=call, daemon=True)
    with SIGNALS.blocked():
        thread.start()
    thread.join(limit_s)
    if failures:
        raise failures[0]
    return not thread.is_alive()


# ---------------------------------------------------------------------------------------------------
# Code of models, templates and users that runs on a thread of this process

_BLOCKS: dict[object, tuple[int, float]] = {}
"""The thread of each block that runs, and when its time is over. Whoever removes a block decides whether it was."""
_watcher = threading.Thread()


class _Expired(BaseException):
    """Not an `Exception`, so that the code in the block does not handle it."""


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the block after `seconds`, on any thread, once it returns from what is written in C."""
    global _watcher
    block = object()
    _BLOCKS[block] = threading.get_ident(), time.monotonic() + seconds
    if not _watcher.is_alive():  # the first block of this process, which may be a fork
        _watcher = threading.Thread(target=_watch, name="deadlines", daemon=True)
        with SIGNALS.blocked():
            _watcher.start()
    try:
        try:
            yield
        finally:
            if _BLOCKS.pop(block, None) is None and not isinstance(sys.exc_info()[1], _Expired):
                time.sleep(time_limits.POLL_INTERVAL_S)  # the exception is on its way
                raise _Expired
    except _Expired:
        raise TimeoutError(f"it ran for more than {seconds:g} seconds") from None


def _watch() -> None:
    while True:
        time.sleep(time_limits.POLL_INTERVAL_S)
        for block, (thread, end) in list(_BLOCKS.items()):
            if time.monotonic() > end and _BLOCKS.pop(block, None) is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_Expired))
