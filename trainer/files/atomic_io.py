"""Durable files: writes that survive a power failure, safe reads, and content hashes."""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from typing import BinaryIO


def write_file(path: str, data: bytes | str, fence: Callable[[], None] = lambda: None, mode: int | None = None) -> None:
    """Write a file atomically: it is complete or absent, even if the process or the machine dies during the write.

    A write for which the disk has no room takes none. `fence` is called before the file appears, and raises if this
    process may no longer write it. `mode`: permissions; None: those of this process.
    """
    staged = f"{path}.tmp"
    try:
        with naming(path), open(staged, "wb") as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        with contextlib.suppress(OSError):
            os.remove(staged)
        raise
    fence()
    os.replace(staged, path)
    sync_path(os.path.dirname(path) or ".")


@contextlib.contextmanager
def naming(path: str) -> Iterator[None]:
    """Add the file name `path` to an OSError in the block that has none. Errors of writes to open files have none."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = path
        raise


def read_file(path: str, folder: int | None = None) -> bytes:
    """Return the content of a regular file. Links are not followed, and a pipe does not block. `folder`: descriptor of
    the directory to which `path` is relative. Raises OSError: the file is missing, cannot be read, or is not a regular
    file."""
    with open_regular(path, os.O_NOFOLLOW, folder) as file:
        return file.read()


def file_problem(path: str) -> str | None:
    """Return why `path` is not a regular file, or None if it is one. Links are followed."""
    try:
        return None if stat.S_ISREG(os.stat(path).st_mode) else "is no regular file, but a directory, pipe or device"
    except OSError as error:
        return f"cannot be read ({error.strerror})"


_UNRELATED_TO_CONTENT = frozenset(
    getattr(errno, name)
    for name in (
        *("EACCES", "EPERM", "ENOKEY", "EKEYEXPIRED", "EKEYREJECTED"),  # permissions, also of Kerberos
        *("EMFILE", "ENFILE", "ENOMEM", "EAGAIN", "EBUSY", "EINTR"),  # limits of this process or machine
        *("ESTALE", "ENOTCONN", "ENODEV", "ENXIO", "ESHUTDOWN", "ECONNREFUSED", "ECONNRESET", "ECONNABORTED"),
        *("ETIMEDOUT", "EHOSTDOWN", "EHOSTUNREACH", "ENETDOWN", "ENETUNREACH"),  # a file server
    )
)


def is_unrelated_to_content(error: OSError) -> bool:
    """Return whether the cause of a failed read lies outside the file. Not for EIO, which a bad sector causes too."""
    return error.errno in _UNRELATED_TO_CONTENT


def open_regular(path: str, flags: int = 0, folder: int | None = None) -> BinaryIO:
    """Open a regular file for reading, with further flags of `os.open`. A pipe does not block."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | flags, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file", path)
    return open(handle, "rb")


def read_inside(root: str, path: str) -> bytes:
    """Return the content of a regular file below `root` (see `read_file`). No component of `path` may be a link."""
    *folders, name = path.split("/")
    handle = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for folder in folders:
            outer, handle = handle, os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=handle)
            os.close(outer)
        return read_file(name, handle)
    finally:
        os.close(handle)


def drop_from_page_cache(path: str) -> None:
    """Ask the kernel to forget a file's content, so that the next read comes from the disk."""
    with open(path, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def sync_path(path: str) -> None:
    """Make the content of a file durable, or the creations, renames and deletions in a directory."""
    handle = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(path: str) -> None:
    """Make every file and directory below `path` durable. Raises OSError: one is missing or cannot be read."""

    def fail(error: OSError) -> None:
        raise error

    for folder, _, names in os.walk(path, onerror=fail):
        for name in names:
            sync_path(os.path.join(folder, name))
        sync_path(folder)


def digest_bytes(data: bytes) -> str:
    """Return the xxh3-128 of `data` in hexadecimal."""
    import xxhash

    return xxhash.xxh3_128_hexdigest(data)


def digest_file(path: str) -> str:
    """Return the xxh3-128 of a file's content. Just after a write the content is still in the page cache."""
    import xxhash

    with open(path, "rb", buffering=0) as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def digest_weights(directory: str) -> str:
    """Return the xxh3-128 of the names and contents of a model directory's weight files."""
    patterns = ("*.safetensors", "*.bin")
    files = sorted(file for pattern in patterns for file in glob.glob(os.path.join(directory, pattern)))
    return digest_bytes(" ".join(f"{os.path.basename(file)}:{digest_file(file)}" for file in files).encode())
