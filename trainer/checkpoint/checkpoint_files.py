"""The files of one checkpoint or staging area, in any storage."""

from __future__ import annotations

import contextlib
import io
import posixpath
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any

import xxhash

from trainer.checkpoint.storage import Storage, open_storage
from trainer.files.atomic_io import digest_bytes, digest_file

if TYPE_CHECKING:
    from torch.distributed.checkpoint import StorageReader, StorageWriter

MANIFEST = "manifest.json"
LATEST = "latest_ckpt_global_step.txt"
"""A file in the directory of checkpoints, for people and tools."""
_STEP_DIRECTORY = re.compile(r"^global_step_(0|[1-9][0-9]{0,17})\Z")
FOLDER = "files-"
"""How the name of a folder begins that holds the files of a checkpoint in an object store."""
_READ_BYTES = 32 << 20
_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True)
class FileEntry:
    """One file of a checkpoint: its path below the checkpoint, its size and its xxh3-128."""

    path: str
    bytes: int
    hash: str


@dataclass(frozen=True)
class CheckpointFiles:
    """The files below the root of a storage. What this process has written is measured and hashed on its way."""

    storage: Storage
    written: dict[str, FileEntry] = field(default_factory=dict, compare=False)
    """The files that were written through this value, by path."""

    @property
    def path(self) -> str:
        """The path or URL of the files."""
        return self.storage.root

    @property
    def folder(self) -> str:
        """The name of the folder below the checkpoint that holds the files; empty: there is none."""
        name = posixpath.basename(self.path)
        return name if self.storage.disk is None and name.startswith(FOLDER) else ""

    def read(self, path: str) -> bytes:
        """Return the content of a file. No component of `path` may be a link."""
        return self.storage.get(path)

    def write(self, path: str, data: bytes) -> FileEntry:
        """Write a small file atomically and durably: after a crash it is complete or absent."""
        self.storage.put(path, data)
        self.written[path] = FileEntry(path, len(data), digest_bytes(data))
        return self.written[path]

    @contextlib.contextmanager
    def open_writer(self, path: str) -> Iterator[HashedStream]:
        """Write a large file, durable after the block, except for its name (see `sync`)."""
        with self.storage.open_writer(path) as stream:
            hashed = HashedStream(stream)
            yield hashed
        self.written[path] = FileEntry(path, hashed.tell(), hashed.digest())

    def upload(self, source: str, path: str) -> None:
        """Write the content of a file of this machine."""
        with open(source, "rb") as file, self.open_writer(path) as stream:
            while chunk := file.read(_CHUNK_BYTES):
                stream.write(chunk)

    def digest(self, path: str) -> str:
        """Return the xxh3-128 of a file's content."""
        if self.storage.disk is not None:
            return digest_file(self.storage.disk.path(path))
        digest, size = xxhash.xxh3_128(), self.storage.size(path)
        for start in range(0, size, _READ_BYTES):
            digest.update(self.storage.get_range(path, start, min(start + _READ_BYTES, size)))
        return digest.hexdigest()

    def contains(self, path: str) -> bool:
        """Return whether `path` stays below the root, links included, and has its shortest form.

        A pipe or a device is not inside: reading it could take for ever.
        """
        if posixpath.normpath(path) != path or path.split("/")[0] in ("", ".", ".."):
            return False
        return self.storage.disk is None or self.storage.disk.contains(path)

    def sync(self, folder: str) -> None:
        """Make what was written to a folder durable. An object is durable when its put has been answered."""
        if self.storage.disk is not None:
            names = [posixpath.basename(path) for path in self.written if posixpath.dirname(path) == folder]
            self.storage.disk.sync(folder, names)

    def free_bytes(self) -> int | None:
        """Return the free space of the disk; None: the storage has no end."""
        return None if self.storage.disk is None else shutil.disk_usage(self.path).free

    def reader(self, folder: str) -> StorageReader:
        """Return DCP's reader of the shards in a folder. It executes no code in the shards."""
        if self.storage.disk is not None:
            from trainer.checkpoint.safe_dcp import SafeReader

            return SafeReader(self.storage.disk.path(folder))
        from trainer.checkpoint.shard_io import RangeReader

        return RangeReader(self.storage, folder)

    def writer(self, folder: str) -> StorageWriter:
        """Return DCP's writer of one file a rank to a folder."""
        from trainer.checkpoint.shard_io import ShardWriter

        return ShardWriter(self, folder)


def step_in(path: str) -> int | None:
    """Return the step in the name of a checkpoint; None if the name does not belong to a checkpoint."""
    match = _STEP_DIRECTORY.match(posixpath.basename(path.rstrip("/")))
    return int(match[1]) if match else None


def files_at(path: str) -> CheckpointFiles:
    """Return the files of the checkpoint or staging area at a path or URL."""
    return CheckpointFiles(open_storage(path))


class HashedStream(io.RawIOBase):
    """A stream that hashes what is written to it. To close it does not close the stream below."""

    def __init__(self, stream: IO[bytes]):
        self._stream = stream
        self._hash = xxhash.xxh3_128()
        self._written = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        self._hash.update(data)
        self._stream.write(data)
        self._written += size
        return size

    def tell(self) -> int:
        return self._written

    def digest(self) -> str:
        """Return the xxh3-128 of what has been written."""
        return self._hash.hexdigest()
