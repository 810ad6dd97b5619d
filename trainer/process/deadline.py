"""A time limit for code of models, templates and users that runs on a thread of this process."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
import time
from collections.abc import Iterator

from trainer.process import time_limits
from trainer.process.signals import SIGNALS

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
