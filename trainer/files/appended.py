"""Files of a run directory to which one process at a time appends lines: metrics, incidents, starts, rewards, the log.

A kill can leave a part of a line at the end of such a file, so whoever appends mends the last line first. Somebody can
delete, replace or edit such a file while the run appends to it; then `AppendedFile` writes it again.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import zlib
from collections.abc import Callable

from trainer.files.atomic_io import naming, read_file, write_file
from trainer.files.documents import parse_object

LOG = logging.getLogger(__name__)

_CHUNK = 1 << 16
_FLAGS = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_CHANGED = (0, 0, 0, 0)
"""The stamp of a file that somebody has deleted or changed between a check and a write. The next check repairs it."""
REPLACED = ".replaced"
"""Ending of the file that keeps what stood in place of an appended file."""


def open_appended(path: str, mode: int | None = None) -> int:
    """Open a file to append to it, mend its last line, and return its descriptor. Links are not followed.

    Args:
        mode: the file's permissions; None: as the process makes files.
    """
    handle = os.open(path, _FLAGS, 0o666 if mode is None else mode)
    try:
        if mode is not None:
            os.fchmod(handle, mode)
        with naming(path):
            _mend(handle, is_text=not path.endswith(".jsonl"))
    except BaseException:
        os.close(handle)
        raise
    return handle


def repair_last_line(path: str) -> None:
    """Complete or cut a last line without a line break, which a kill has left in a file. Does nothing without a file.

    A line of text, or a whole JSON object, gets the line break. A part of a JSON object is cut.
    """
    if os.path.isfile(path) and not os.path.islink(path):
        os.close(open_appended(path))


def append_line(path: str, line: bytes) -> None:
    """Append a line, without its line break, to a file whose last line is mended first.

    Raises:
        OSError: the line could not be written. The file is as it was before.
    """
    handle = open_appended(path)
    try:
        with naming(path):
            write_whole(handle, line + b"\n")
    finally:
        os.close(handle)


def write_whole(handle: int, data: bytes) -> None:
    """Append `data` in one write, so that a kill leaves all of it or nothing.

    Raises:
        OSError: less than all could be written; then the file has nothing of it.
    """
    before = os.fstat(handle).st_size
    if os.write(handle, data) != len(data):
        os.ftruncate(handle, before)
        raise OSError(errno.ENOSPC, "the last line was cut short; is the disk full?")


def _mend(handle: int, is_text: bool) -> None:
    size = os.fstat(handle).st_size
    if size == 0 or os.pread(handle, 1, size - 1) == b"\n":
        return
    tail, start = b"", size
    while start and b"\n" not in tail:
        length = min(start, _CHUNK)
        start -= length
        tail = os.pread(handle, length, start) + tail
    line = tail[tail.rfind(b"\n") + 1 :]
    if is_text or _is_object(line):
        write_whole(handle, b"\n")
    else:
        os.ftruncate(handle, size - len(line))


def _is_object(line: bytes) -> bool:
    try:
        parse_object(line)
    except ValueError:
        return False
    return True


class AppendedFile:
    """A file of lines that must keep all of them as long as this process appends to it.

    The content is also kept in memory, compressed. Before each write the file is compared with what this process has
    left there. If somebody has deleted or changed it, it is written again, and what stood in its place is kept beside
    it as `NAME.replaced`. The file is created with its first line.

    Args:
        fence: raises when this process no longer holds the run directory: then the file belongs to another process,
            and is not written again.
        mode: the file's permissions; None: as the process makes files.
    """

    def __init__(self, path: str, fence: Callable[[], None] = lambda: None, mode: int | None = None):
        self._path = path
        self._fence = fence
        self._mode = mode
        self._chunks: list[bytes] = []
        self._packer = zlib.compressobj(1)
        self._stamp: tuple[int, int, int, int] | None = None
        self._is_loaded = False
        self._lock = threading.RLock()  # signal handlers append, too

    def content(self) -> bytes:
        """Return all lines."""
        with self._lock:
            self._load()
            return zlib.decompress(b"".join(self._chunks) + self._packer.copy().flush())

    def append(self, lines: bytes, durable: bool = False) -> None:
        """Append whole lines, with their line breaks.

        Args:
            durable: wait until they are on the disk.

        Raises:
            OSError: they could not be written. The file is as it was before.
        """
        assert lines.endswith(b"\n")
        with self._lock:
            self.check()
            handle = open_appended(self._path, self._mode)
            try:
                status = os.fstat(handle)
                is_same = status.st_size == 0 if self._stamp is None else _stamp_of(status) == self._stamp
                with naming(self._path):
                    write_whole(handle, lines)
                    if durable:
                        os.fsync(handle)
                self._stamp = _stamp_of(os.fstat(handle)) if is_same else _CHANGED
            finally:
                os.close(handle)
            self._keep(lines)

    def rewrite(self, content: bytes) -> None:
        """Replace the whole file atomically, whatever stands there."""
        with self._lock:
            write_file(self._path, content, self._fence, self._mode)
            self._chunks, self._packer, self._is_loaded = [], zlib.compressobj(1), True
            self._keep(content)
            self._stamp = self._current()

    def check(self) -> None:
        """Write the file again if somebody has deleted or changed it.

        Raises:
            OSError: it cannot be written.
            UserError: this process no longer holds the run directory.
        """
        with self._lock:
            self._load()
            found = self._current()
            if found == self._stamp:
                return
            content = self.content()
            if found is not None and _content_of(self._path) == content:  # touched, or a copy in its place
                self._stamp = found
                return
            self._fence()
            if found is not None:
                _keep_replaced(self._path)
            write_file(self._path, content, self._fence, self._mode)
            self._stamp = self._current()
        LOG.warning(
            "%s was %s while the run appends to it: all lines of the run are written again%s",
            self._path,
            "deleted" if found is None else "changed",
            "" if found is None else f"; what stood there is in {os.path.basename(self._path)}{REPLACED}",
        )

    def sync(self) -> None:
        """Wait until all lines are on the disk."""
        self.check()
        if self._stamp is not None:
            handle = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                with naming(self._path):
                    os.fsync(handle)
            finally:
                os.close(handle)

    def _load(self) -> None:
        if not self._is_loaded:
            self._is_loaded = True
            repair_last_line(self._path)
            if os.path.lexists(self._path):
                self._keep(read_file(self._path))
                self._stamp = self._current()

    def _keep(self, lines: bytes) -> None:
        self._chunks.append(self._packer.compress(lines))

    def _current(self) -> tuple[int, int, int, int] | None:
        try:
            return _stamp_of(os.stat(self._path, follow_symlinks=False))
        except FileNotFoundError:
            return None


def _keep_replaced(path: str) -> None:
    """Keep what stands at `path` as `NAME.replaced`, too.

    It also stays at `path`, so that a full disk or a kill does not leave the run without the file.
    """
    replaced = path + REPLACED
    try:
        with contextlib.suppress(FileNotFoundError):
            os.remove(replaced)
        os.link(path, replaced, follow_symlinks=False)
    except OSError:  # a directory, or a file system without hard links
        os.replace(path, replaced)


def _stamp_of(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _content_of(path: str) -> bytes | None:
    try:
        return read_file(path)
    except OSError:  # a link, or a directory
        return None
