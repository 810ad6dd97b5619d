"""Storage for checkpoints: a directory, or a prefix in an object store, behind a few operations on keys.

Everything else about checkpoints (commits, retention, locks, two tiers) is written once, on top of these operations. A
key is a path relative to the root, with slashes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import posixpath
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO, Any, TypeVar

import xxhash

from trainer.errors import UserError
from trainer.files.atomic_io import (
    digest_bytes,
    digest_file,
    file_problem,
    naming,
    read_inside,
    sync_path,
    sync_tree,
    write_file,
)
from trainer.files.uris import is_url

T = TypeVar("T")

_GUARD_ATTEMPTS = 10
_READ_BYTES = 32 << 20
_CHUNK_BYTES = 8 << 20
_PARALLEL = 4
JOURNAL = ".journal"  # the directory of the records of rollouts
TURNS = ".turns"  # the end of a file with turns of episodes; one of whole episodes ends with `.arrow`
_RECORDS = re.compile(r"step_(0|[1-9][0-9]{0,17})-([1-9][0-9]{0,18})-[0-9a-f]{32}\.(?:arrow|turns)")


class StoreError(UserError, OSError):
    """The store does not answer, or refuses. This says nothing about whether an object is there, or is damaged."""


@dataclass(frozen=True)
class FileEntry:
    """One file of a checkpoint: its path below the checkpoint, its size and its xxh3-128."""

    path: str
    bytes: int
    hash: str


class Storage:
    """A directory or a prefix. Every method raises OSError if the storage fails.

    What has been put is durable when the call returns. A method that reads raises FileNotFoundError if the key is
    missing. What is written with `write`, `open_writer` and `upload` is measured and hashed on its way.
    """

    disk: LocalStorage | None = None
    """The storage itself, if it is a disk, which knows directories, links and renames; None: it is none."""

    def __init__(self, root: str):
        self.root = root  # an absolute path or a URL, without a slash at its end
        self.written: dict[str, FileEntry] = {}  # by key, what was written and hashed through this value

    # ---------------------------------------------------------------------------------------------------
    # What each kind of storage does for itself

    def get_with_etag(self, key: str) -> tuple[bytes, str]: ...  # the tag changes with every write
    def get_range(self, key: str, start: int, end: int) -> bytes: ...  # from `start` to before `end`
    def put(self, key: str, data: bytes) -> None: ...  # whole, or not at all
    def put_if(self, key: str, data: bytes, etag: str | None) -> bool: ...  # if it has this tag; None: if it is absent
    def open_stream(self, key: str) -> contextlib.AbstractContextManager[IO[bytes]]: ...  # large: there after the block
    def size(self, key: str) -> int: ...
    def list(self, prefix: str = "") -> dict[str, int]: ...  # sizes of all below `prefix`, by key
    def names(self, prefix: str = "") -> list[str]: ...  # directly below `prefix`, folders too; empty: it is absent
    def delete(self, key: str) -> None: ...  # if it is there
    def delete_below(self, prefix: str) -> None: ...

    # ---------------------------------------------------------------------------------------------------
    # What a disk does otherwise

    def get(self, key: str) -> bytes:
        return self.get_with_etag(key)[0]

    def exists(self) -> bool:
        """Return whether the root is there. A prefix always is."""
        return True

    def make(self) -> None:
        """Make the root. A prefix needs none."""

    def delete_if_match(self, key: str, etag: str) -> bool:
        """Return whether an object with this tag was deleted. Not every store knows such a request."""
        return False

    def sync_written(self, folder: str) -> None:
        """Make what was written to a folder durable. An object is durable when its put has been answered."""

    def free_bytes(self) -> int | None:
        """Return the free space; None: the storage has no end."""
        return None

    def digest(self, key: str, copy: int | None = None) -> str:
        """Return the xxh3-128 of the content. `copy`: descriptor of a local file that gets the content."""
        digest, size = xxhash.xxh3_128(), self.size(key)

        def fetch(start: int) -> None:
            data = self.get_range(key, start, min(start + _READ_BYTES, size))
            digest.update(data) if copy is None else os.pwrite(copy, data, start)

        for_each(fetch, range(0, size, _READ_BYTES), 1 if copy is None else _PARALLEL)
        return digest.hexdigest() if copy is None else digest_file(f"/proc/self/fd/{copy}")

    def contains(self, key: str) -> bool:
        """Return whether a key stays below the root, links included, and has its shortest form.

        A pipe or a device is not inside: reading it could take for ever.
        """
        return posixpath.normpath(key) == key and key.split("/")[0] not in ("", ".", "..")

    # ---------------------------------------------------------------------------------------------------
    # Writes that are hashed

    def write(self, key: str, data: bytes) -> FileEntry:
        """Write a small file atomically and durably: after a crash it is complete or absent."""
        self.put(key, data)
        self.written[key] = FileEntry(key, len(data), digest_bytes(data))
        return self.written[key]

    @contextlib.contextmanager
    def open_writer(self, key: str) -> Iterator[HashedStream]:
        """Write a large file, durable after the block, except for its name (see `sync_written`)."""
        with self.open_stream(key) as stream:
            hashed = HashedStream(stream)
            yield hashed
        self.written[key] = FileEntry(key, hashed.tell(), hashed.digest())

    def upload(self, source: str, key: str) -> None:
        """Write the content of a file of this machine."""
        with open(source, "rb") as file, self.open_writer(key) as stream:
            while chunk := file.read(_CHUNK_BYTES):
                stream.write(chunk)


class HashedStream(io.RawIOBase):
    """A stream that hashes what is written to it. To close it does not close the stream below."""

    def __init__(self, stream: IO[bytes]):
        self._stream = stream
        self._hash = xxhash.xxh3_128()
        self._written = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        content = memoryview(data).cast("B")
        self._hash.update(content)
        self._stream.write(content)
        self._written += len(content)
        return len(content)

    def tell(self) -> int:
        return self._written

    def digest(self) -> str:
        """Return the xxh3-128 of what has been written."""
        return self._hash.hexdigest()


def records_in(names: Iterable[str]) -> dict[str, int]:
    """Return the steps of the files of the journal among `names`, by name; the oldest file comes first."""
    matches = [match for name in names if (match := _RECORDS.fullmatch(name))]
    return {match[0]: int(match[1]) for match in sorted(matches, key=lambda match: (int(match[2]), match[0]))}


def remove_records(storage: Storage, is_unwanted: Callable[[int], bool]) -> None:
    """Delete the files of the journal that belong to some steps."""
    names = [name for name, step in records_in(storage.names(JOURNAL)).items() if is_unwanted(step)]
    for_each(lambda name: storage.delete(f"{JOURNAL}/{name}"), names)


def for_each(function: Callable[[T], object], items: Iterable[T], parallel: int = 16) -> None:
    """Call a function with each item, several at a time. Raises what the first call that failed has raised."""
    if parallel == 1:
        for item in items:
            function(item)
        return
    with ThreadPoolExecutor(parallel) as pool:
        for _ in pool.map(function, items):
            pass


def open_storage(root: str) -> Storage:
    """Return the storage in the directory, or at the URL, `root`. No other code asks which kind it is."""
    if is_url(root):
        from trainer.checkpoint.buckets import ObjectStorage

        return ObjectStorage(root)
    return LocalStorage(root)


class LocalStorage(Storage):
    """A directory. A key is the path of a file below it.

    Writes on a condition hold a lock on the file `<key>.guard`, so they exclude each other on all machines that see the
    directory, as far as its file system knows `flock`.
    """

    def __init__(self, root: str):
        super().__init__(os.path.abspath(root))

    @property
    def disk(self) -> LocalStorage:
        return self

    def exists(self) -> bool:
        return os.path.isdir(self.root)

    def make(self) -> None:
        """Make the root, but no directory above it. It may be removed at any moment."""
        if os.path.islink(self.root) and not os.path.exists(self.root):
            raise FileExistsError(errno.EEXIST, "a link to a missing directory", self.root)
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.root)

    def path(self, key: str) -> str:
        return os.path.join(self.root, key) if key else self.root

    def get(self, key: str) -> bytes:
        """Return the content of a regular file. No component of the key may be a link."""
        return read_inside(self.root, key)

    def get_with_etag(self, key: str) -> tuple[bytes, str]:
        data, status = self.get(key), os.stat(self.path(key))
        return data, f"{status.st_ino}-{status.st_mtime_ns}-{digest_bytes(data)}"

    def get_range(self, key: str, start: int, end: int) -> bytes:
        path = self.path(key)
        with open(path, "rb") as file:
            file.seek(start)
            data = file.read(end - start)
        if len(data) != end - start:
            raise OSError(errno.EIO, f"{path} ends after {start + len(data)} bytes")
        return data

    def put(self, key: str, data: bytes) -> None:
        path = self.path(key)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        write_file(path, data)

    def put_if(self, key: str, data: bytes, etag: str | None) -> bool:
        with self._guarded(key, etag) as is_match:
            if is_match:
                write_file(self.path(key), data)
        return is_match

    def touch_if_match(self, key: str, etag: str) -> None:
        """Give a file another tag if it has this one. Unlike a write, this waits for no busy disk."""
        with self._guarded(key, etag) as is_match:
            if is_match:
                os.utime(self.path(key))

    def delete_if_match(self, key: str, etag: str) -> bool:
        """Delete a file and its guard if the file has this tag; return whether it was deleted."""
        with self._guarded(key, etag) as is_match:
            if is_match:
                os.remove(self.path(key))
                os.remove(f"{self.path(key)}.guard")
        return is_match

    @contextlib.contextmanager
    def open_stream(self, key: str) -> Iterator[IO[bytes]]:
        path = self.path(key)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with naming(path), open(path, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())

    def size(self, key: str) -> int:
        """Return the size of a regular file in bytes."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            status = os.stat(self.path(key))
            if stat.S_ISREG(status.st_mode):
                return status.st_size
        raise FileNotFoundError(errno.ENOENT, "no such file", key)

    def list(self, prefix: str = "") -> dict[str, int]:
        sizes = {}
        for folder, _, names in os.walk(self.path(prefix)):
            for name in names:
                path = os.path.join(folder, name)
                with contextlib.suppress(OSError):  # a link to a missing file
                    status = os.stat(path)
                    if stat.S_ISREG(status.st_mode):
                        sizes[os.path.relpath(path, self.root)] = status.st_size
        return dict(sorted(sizes.items()))

    def names(self, prefix: str = "") -> list[str]:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return sorted(os.listdir(self.path(prefix)))
        return []

    def delete(self, key: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.remove(self.path(key))

    def delete_below(self, prefix: str) -> None:
        shutil.rmtree(self.path(prefix))

    # ---------------------------------------------------------------------------------------------------
    # What only a disk can do

    def rename(self, source: str, target: str) -> None:
        """Rename a directory atomically and durably."""
        os.rename(self.path(source), self.path(target))
        sync_path(self.root)

    def sync(self, prefix: str, names: list[str] | None = None) -> None:
        """Make files of a directory durable, first their content and then their names; None: everything below it."""
        if names is None:
            return sync_tree(self.path(prefix))
        for name in names:
            sync_path(os.path.join(self.path(prefix), name))
        sync_path(self.path(prefix))

    def sync_written(self, folder: str) -> None:
        self.sync(folder, [posixpath.basename(key) for key in self.written if posixpath.dirname(key) == folder])

    def free_bytes(self) -> int:
        return shutil.disk_usage(self.root).free

    def digest(self, key: str, copy: int | None = None) -> str:
        return digest_file(self.path(key))

    def contains(self, key: str) -> bool:
        if not super().contains(key):
            return False
        root = os.path.realpath(self.root)
        target = os.path.realpath(os.path.join(root, key))
        return target.startswith(root + os.sep) and (not os.path.exists(target) or file_problem(target) is None)

    @contextlib.contextmanager
    def _guarded(self, key: str, etag: str | None) -> Iterator[bool]:
        """Let one process at a time run the block, and tell it whether the file has this tag (None: there is none)."""
        path = f"{self.path(key)}.guard"
        for attempt in range(_GUARD_ATTEMPTS):
            with open(path, "w") as guard:
                with contextlib.suppress(OSError):  # a file system without flock: a race is possible but unlikely
                    fcntl.flock(guard, fcntl.LOCK_EX)
                # Another process may have removed the file that this process waited for. The number of attempts is
                # bounded, because inode numbers are not stable on every file system.
                current = os.path.samestat(os.fstat(guard.fileno()), os.stat(path))
                if current or attempt == _GUARD_ATTEMPTS - 1:
                    found = None
                    with contextlib.suppress(FileNotFoundError):
                        found = self.get_with_etag(key)[1]
                    yield found == etag
                    return
