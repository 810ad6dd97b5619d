"""Files to which one process at a time appends lines: metrics, incidents, starts, rewards, the log."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import threading
from collections.abc import Callable, Iterator

from trainer.errors import is_disk_unwritable
from trainer.files.atomic_io import naming

LOG = logging.getLogger(__name__)

_CHUNK = 1 << 16
_FLAGS = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


def open_appended(path: str, mode: int | None = None) -> int:
    """Open a file to append to it, cut its torn last line, and return its descriptor. Links are not followed. `mode`:
    permissions of the file. None: the default permissions of this process."""
    handle = os.open(path, _FLAGS, 0o666 if mode is None else mode)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        if mode is not None:
            os.fchmod(handle, mode)
        with naming(path):
            size = end = os.fstat(handle).st_size
            line_break = -1
            while end and line_break < 0:
                start = max(0, end - _CHUNK)
                line_break = os.pread(handle, end - start, start).rfind(b"\n")
                end = start + line_break + 1
            if end < size:
                os.ftruncate(handle, end)
    except BaseException:
        os.close(handle)
        raise
    return handle


def cut_torn_line(path: str) -> None:
    """Remove a last line without a line break, which a kill has left. Does nothing without a file."""
    if os.path.isfile(path) and not os.path.islink(path):
        os.close(open_appended(path))


def write_all_or_nothing(handle: int, data: bytes) -> None:
    """Append `data` with one write call, so that a kill, or an OSError, leaves all of it or nothing."""
    size = os.fstat(handle).st_size
    if os.write(handle, data) != len(data):
        os.ftruncate(handle, size)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class AppendedFile:
    """A file of lines, created with its first one. Thread-safe. Nothing is written once `fence` raises: then the file
    belongs to another process.

    Lines for which a full disk has no room wait in memory, and are written with the next ones.
    """

    def __init__(self, path: str, fence: Callable[[], None] = lambda: None, mode: int | None = None):
        self._path = path
        self._fence = fence
        self._mode = mode
        self._waiting = b""
        self._lock = threading.Lock()

    def append(self, lines: bytes, durable: bool = False) -> None:
        """Append complete lines, with their line breaks; if `durable`, wait until they are on the disk. If the disk is
        full, a warning says once that lines wait. Raises OSError: they could not be written for another reason."""
        assert lines.endswith(b"\n")
        with self._lock:
            had_to_wait, self._waiting = bool(self._waiting), self._waiting + lines
            try:
                self._write(durable)
            except OSError as error:
                if not is_disk_unwritable(error):
                    raise
                if not had_to_wait:
                    text = "%s: cannot be written (%s); its lines wait in memory: free space on the disk, or repair it"
                    LOG.warning(text, self._path, error.strerror)

    def sync(self) -> None:
        """Write the lines that wait, and wait until all lines are on the disk. Raises OSError: the file cannot be
        written. The lines still wait. Raises UserError: this process no longer holds the run directory."""
        with self._lock:
            if self._waiting or os.path.exists(self._path):
                self._write(durable=True)

    def cut(self, size: int) -> None:
        """Keep the first `size` bytes of a file that is there, and wait until the rest is off the disk."""
        with self._lock, self._opened() as handle:
            os.ftruncate(handle, size)
            os.fsync(handle)

    def _write(self, durable: bool) -> None:
        with self._opened() as handle:
            write_all_or_nothing(handle, self._waiting)
            self._waiting = b""
            if durable:
                os.fsync(handle)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        self._fence()
        handle = open_appended(self._path, self._mode)
        try:
            with naming(self._path):
                yield handle
        finally:
            os.close(handle)
