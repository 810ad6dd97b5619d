"""Files of a run directory to which one process at a time appends lines: metrics, incidents, starts, rewards, the log.

A kill can leave an incomplete line at the end of such a file, so every writer repairs the last line first. Somebody can
delete, replace or edit such a file while the run appends to it. Then `AppendedFile` writes the file again. While the
disk is full, it keeps the lines in memory.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import zlib
from collections.abc import Callable

from trainer.errors import is_disk_unwritable
from trainer.files.atomic_io import naming, read_file, sync_path, write_file
from trainer.files.documents import parse_object

LOG = logging.getLogger(__name__)

_CHUNK = 1 << 16
_FLAGS = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_CHANGED = (0, 0, 0, 0)
"""The stamp of a file that was deleted or changed between a check and a write. The next check repairs the file."""
REPLACED = ".replaced"
"""Suffix of the file that keeps the foreign content of an appended file."""


def open_appended(path: str, mode: int | None = None) -> int:
    """Open a file to append to it, repair its last line, and return its descriptor. Links are not followed.

    Args:
        mode: permissions of the file. None: the default permissions of this process.
    """
    handle = os.open(path, _FLAGS, 0o666 if mode is None else mode)
    try:
        if mode is not None:
            os.fchmod(handle, mode)
        with naming(path):
            _repair_last_line(handle, is_text=not path.endswith(".jsonl"))
    except BaseException:
        os.close(handle)
        raise
    return handle


def repair_last_line(path: str) -> None:
    """Complete or remove a last line without a line break, which a kill has left. Does nothing without a file.

    A line of text, or a complete JSON object, gets the line break. An incomplete JSON object is removed.
    """
    if os.path.isfile(path) and not os.path.islink(path):
        os.close(open_appended(path))


def write_all_or_nothing(handle: int, data: bytes) -> None:
    """Append `data` with one write call, so that a kill leaves all of it or nothing.

    Raises:
        OSError: not all data could be written. The file is unchanged.
    """
    size = os.fstat(handle).st_size
    if os.write(handle, data) != len(data):
        os.ftruncate(handle, size)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _repair_last_line(handle: int, is_text: bool) -> None:
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
        write_all_or_nothing(handle, b"\n")
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

    The content is also kept in memory, compressed. Before each write, the file is compared with the state in which this
    process has left it. If somebody has deleted or changed it, the file is written again, and the foreign content is
    kept in `NAME.replaced` in the same directory. The file is created with its first line.

    Lines for which a full disk has no room wait in memory, and are written with the next ones (see `append`).

    Args:
        fence: raises when this process no longer holds the run directory. Then the file belongs to another process,
            and is not written again.
        mode: permissions of the file. None: the default permissions of this process.
    """

    def __init__(self, path: str, fence: Callable[[], None] = lambda: None, mode: int | None = None):
        self._path = path
        self._fence = fence
        self._mode = mode
        self._chunks: list[bytes] = []
        self._packer = zlib.compressobj(1)
        self._waiting = b""  # the last lines, for which a full disk had no room
        self._stamp: tuple[int, int, int, int] | None = None
        self._is_loaded = False
        self._lock = threading.RLock()

    def content(self) -> bytes:
        """Return all lines, also those that wait for room on the disk."""
        with self._lock:
            self._load()
            return zlib.decompress(b"".join(self._chunks) + self._packer.copy().flush())

    def append(self, lines: bytes, durable: bool = False) -> None:
        """Append complete lines, with their line breaks.

        If the disk is full or read-only, one warning says so, and the lines wait in memory. Later calls of `append`,
        `check` and `sync` try to write them first.

        Args:
            durable: wait until the lines are on the disk, unless the disk is full.

        Raises:
            OSError: the lines could not be written for another reason.
        """
        assert lines.endswith(b"\n")
        with self._lock:
            try:
                self._load()
                self._write(lines, durable)
            except OSError as error:
                if not is_disk_unwritable(error):
                    raise
                if not self._waiting:
                    LOG.warning(
                        "%s: cannot be written (%s); its lines wait in memory for room: free space on the disk, or "
                        "repair it",
                        self._path,
                        error.strerror,
                    )
                self._waiting += lines
            if self._is_loaded:
                self._remember(lines)

    def rewrite(self, content: bytes) -> None:
        """Replace the complete file atomically, whatever its current content is."""
        with self._lock:
            write_file(self._path, content, self._fence, self._mode)
            self._chunks, self._packer, self._is_loaded, self._waiting = [], zlib.compressobj(1), True, b""
            self._remember(content)
            self._stamp = self._current()

    def check(self) -> None:
        """Write the file again if somebody has deleted or changed it, and write the lines that wait.

        Raises:
            OSError: the file cannot be written.
            UserError: this process no longer holds the run directory.
        """
        with self._lock:
            self._load()
            self._write(b"")

    def sync(self) -> None:
        """Wait until all lines are on the disk.

        Raises:
            OSError: the file cannot be written. Lines that wait for room still wait.
        """
        self.check()
        if self._stamp is not None:
            sync_path(self._path)

    def _write(self, lines: bytes, durable: bool = False) -> None:
        """Append the lines that wait, and `lines`, to the file as this process has left it."""
        has_waited = bool(self._waiting)
        self._repair()
        if data := self._waiting + lines:
            handle = open_appended(self._path, self._mode)
            status = os.fstat(handle)
            is_same = status.st_size == 0 if self._stamp is None else _stamp_of(status) == self._stamp
            self._stamp = _CHANGED  # as long as it is not known what the file has
            try:
                with naming(self._path):
                    write_all_or_nothing(handle, data)
                    if durable:
                        os.fsync(handle)
                stamp = _stamp_of(os.fstat(handle)) if is_same else _CHANGED
            except OSError:
                if is_same and os.fstat(handle).st_size == status.st_size:  # only its time has changed
                    self._stamp = _stamp_of(os.fstat(handle))
                raise
            finally:
                os.close(handle)
            self._stamp = stamp
        self._waiting = b""
        if has_waited:
            LOG.info("%s: the lines that have waited for room are written", self._path)

    def _repair(self) -> None:
        """Write the file again, with the lines that wait, if somebody has deleted or changed it."""
        stamp = self._current()
        if stamp == self._stamp:
            return
        content = self.content()
        found = None if stamp is None else _content_of(self._path)
        if found == content:  # also the lines that wait: they were written, and that was not reported
            self._stamp, self._waiting = stamp, b""
            return
        if found is not None and found == content.removesuffix(self._waiting):
            self._stamp = stamp  # it was touched, or replaced by a copy
            return
        self._fence()
        if stamp is not None:
            _keep_replaced(self._path)
        write_file(self._path, content, self._fence, self._mode)
        self._stamp, self._waiting = self._current(), b""
        LOG.warning(
            "%s was %s while the run appends to it: all lines of the run are written again%s",
            self._path,
            "deleted" if stamp is None else "changed",
            "" if stamp is None else f"; its changed content is in {os.path.basename(self._path)}{REPLACED}",
        )

    def _load(self) -> None:
        if self._is_loaded:
            return
        repair_last_line(self._path)
        if os.path.lexists(self._path):
            content, self._stamp = read_file(self._path), self._current()
            self._remember(content)
        if self._waiting:
            self._remember(self._waiting)
        self._is_loaded = True

    def _remember(self, lines: bytes) -> None:
        self._chunks.append(self._packer.compress(lines))

    def _current(self) -> tuple[int, int, int, int] | None:
        try:
            return _stamp_of(os.stat(self._path, follow_symlinks=False))
        except FileNotFoundError:
            return None


def _keep_replaced(path: str) -> None:
    """Keep the file at `path` as `NAME.replaced` as well.

    The file also stays at `path`, so that a full disk or a kill does not leave the run without a file.
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
