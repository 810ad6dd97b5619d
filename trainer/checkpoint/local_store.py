"""Checkpoints on a file system that all ranks see. The rename of a draft's directory is the commit."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.checkpoint.lock import RunLock
from trainer.checkpoint.names import HINT, MANIFEST, step_in
from trainer.checkpoint.one_tier import OneTier
from trainer.files.atomic_io import (
    digest_file,
    file_problem,
    forget,
    read_inside,
    sync_directory,
    sync_file,
    sync_tree,
    write_file,
)

if TYPE_CHECKING:
    from torch.distributed.checkpoint import StorageReader, StorageWriter

_WRITING, _DELETING, _ASIDE, _PROBE, _RECORD = ".writing-", ".deleting-", ".aside-", ".probe-", ".record"
_INTERRUPTED = {_WRITING: "an interrupted save", _DELETING: "an interrupted deletion", _PROBE: "an interrupted test"}


@dataclass(frozen=True)
class LocalFiles:
    """The files in a directory."""

    path: str
    folder: str = ""
    """The name of the folder below the checkpoint that holds the files: there is none."""
    copies: int = 0
    """Of a draft: the number of other nodes whose disks also get each rank's shards."""

    def read(self, path: str) -> bytes:
        """Return the content of a regular file. No part of `path` may be a link.

        Raises:
            OSError: the file is missing, cannot be read, or is not a regular file.
        """
        return read_inside(self.path, path)

    def write(self, path: str, data: bytes) -> None:
        """Write a small file atomically and durably: after a crash it is complete or absent."""
        target = os.path.join(self.path, path)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        write_file(target, data)

    def sizes(self) -> dict[str, int]:
        """Return the size of every regular file in bytes, by path."""
        sizes = {}
        for folder, _, names in os.walk(self.path):
            for name in names:
                path = os.path.join(folder, name)
                with contextlib.suppress(OSError):  # a link to a missing file
                    status = os.stat(path)
                    if stat.S_ISREG(status.st_mode):
                        sizes[os.path.relpath(path, self.path)] = status.st_size
        return dict(sorted(sizes.items()))

    def size(self, path: str) -> int:
        """Return the size of a regular file in bytes.

        Raises:
            FileNotFoundError: there is no regular file.
            OSError: the directory cannot be read.
        """
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            status = os.stat(os.path.join(self.path, path))
            if stat.S_ISREG(status.st_mode):
                return status.st_size
        raise FileNotFoundError(errno.ENOENT, "no such file", path)

    def digest(self, path: str) -> str:
        """Return the xxh3-128 of a file's content."""
        return digest_file(os.path.join(self.path, path))

    def contains(self, path: str) -> bool:
        """Return whether `path` stays below the directory, links included, and has its shortest form.

        A pipe or a device is not inside: reading it could take for ever.
        """
        normal = os.path.normpath(path)
        if os.path.isabs(normal) or normal.split("/")[0] in ("..", ".") or normal != path:
            return False
        root = os.path.realpath(self.path)
        target = os.path.realpath(os.path.join(root, normal))
        if not target.startswith(root + os.sep):
            return False
        return not os.path.exists(target) or file_problem(target) is None

    def own(self, folder: str, rank: int) -> list[str]:
        """Return the names of the files in a folder that DCP has written for this rank, sorted."""
        own = (f"__{rank}_", ".metadata") if rank == 0 else (f"__{rank}_",)
        return sorted(name for name in os.listdir(os.path.join(self.path, folder)) if name.startswith(own))

    def sync(self, folder: str, names: list[str]) -> None:
        """Make these files of a folder durable, first their content and then their names."""
        for name in names:
            sync_file(os.path.join(self.path, folder, name))
        sync_directory(os.path.join(self.path, folder))

    def space(self) -> int:
        """Return the free space of the disk in bytes."""
        return shutil.disk_usage(self.path).free

    def reader(self, folder: str) -> StorageReader:
        """Return DCP's reader of the shards in a folder. It executes no code in the shards."""
        from trainer.checkpoint.safe_dcp import SafeReader

        return SafeReader(os.path.join(self.path, folder))

    def writer(self, folder: str) -> StorageWriter:
        """Return DCP's writer of shards to a folder."""
        from torch.distributed.checkpoint import FileSystemWriter

        return FileSystemWriter(os.path.join(self.path, folder), single_file_per_rank=True, sync_files=True)


class LocalStore(OneTier):
    """Checkpoints as directories below `root`. The rename of a draft to `global_step_N` is its commit.

        .writing-…     a draft, of a save that is under way or was killed
        .deleting-…    a withdrawn checkpoint that is not removed yet
        .aside-…       a checkpoint that was set aside, because the run went back to an older one

    Every method raises OSError if the disk fails.
    """

    keeps_record = False

    def __init__(self, root: str):
        self.root = os.path.abspath(root)
        self._tried: dict[int, bytes] = {}  # the manifests of the commits that this process has tried

    def exists(self) -> bool:
        """Return whether the root is a directory."""
        return os.path.isdir(self.root)

    def lock(self, timeout_s: float, name: str, remedy: str) -> RunLock:
        """Return the lock of the place, not yet taken."""
        return RunLock(self.root, timeout_s, name, remedy)

    def names(self) -> list[str]:
        """Return all names in the root; empty if the root does not exist."""
        try:
            return sorted(os.listdir(self.root))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def steps(self) -> list[int]:
        """Return the steps of the directories that are named like checkpoints, ascending."""
        return sorted(step for step in map(step_in, self.names()) if step is not None)

    def path(self, step: int) -> str:
        """Return the path of the checkpoint of a step, which need not exist."""
        return os.path.join(self.root, f"global_step_{step}")

    def begin(self, step: int) -> LocalFiles:
        """Make an empty draft.

        Each draft has a random token in its name, so that a surviving process of a killed run cannot write into it.
        """
        draft = os.path.join(self.root, f"{_WRITING}global_step_{step}-{secrets.token_hex(4)}")
        os.makedirs(draft)
        return LocalFiles(draft)

    def publish(self, draft: LocalFiles, step: int, manifest: bytes, before_commit: Callable[[], None]) -> None:
        """Commit a draft: make it durable, add its manifest, and give it the name of the checkpoint.

        Args:
            before_commit: called immediately before the commit. If it raises, nothing is committed.
        """
        if os.path.exists(self.path(step)):
            if read_inside(self.path(step), MANIFEST) != self._tried.get(step):
                raise OSError(errno.EEXIST, f"{self.path(step)} has been committed by another job")
            sync_directory(self.root)
            self.discard(draft)  # an earlier try, which seemed to have failed, is the checkpoint
            return
        sync_tree(draft.path)
        draft.write(MANIFEST, manifest)
        before_commit()
        self._tried[step] = manifest
        self._rename(draft.path, self.path(step))

    def discard(self, draft: LocalFiles) -> None:
        """Delete a draft."""
        shutil.rmtree(draft.path)

    def withdraw(self, step: int) -> str:
        """Take a checkpoint out of service atomically; returns the name of its remains, for `remove`."""
        return self._hide(step, _DELETING)

    def set_aside(self, step: int) -> str:
        """Take a checkpoint out of service and keep it; returns its new name."""
        return self._hide(step, _ASIDE)

    def asides(self, step: int | None = None) -> list[str]:
        """Return the names of checkpoints of this step (None: of any step) that were set aside."""
        prefix = _ASIDE if step is None else f"{_ASIDE}global_step_{step}-"
        return [name for name in self.names() if name.startswith(prefix)]

    def leftovers(self) -> dict[str, str]:
        """Return the names of the leftovers of interrupted operations, and the kind of each."""
        return {name: kind for name in self.names() for prefix, kind in _INTERRUPTED.items() if name.startswith(prefix)}

    def remove(self, name: str) -> None:
        """Delete a directory or file that `leftovers`, `withdraw` or `asides` names."""
        path = os.path.join(self.root, name)
        if name.startswith(_WRITING):  # the job that has begun it may be about to commit it
            path = os.path.join(self.root, _DELETING + name.removeprefix(_WRITING))
            os.rename(os.path.join(self.root, name), path)
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.remove(path)

    def hint(self, step: int) -> None:
        """Write the newest step to a file for people and tools. This project never reads the file."""
        write_file(os.path.join(self.root, HINT), f"{step}\n")

    def probe(self, size: int = 64) -> None:
        """Test the operations of a save: make a directory, write a file durably, rename, read back, remove.

        Args:
            size: bytes of the file. They are read back from the disk if the kernel drops them from its cache.

        Raises:
            OSError: an operation failed.
        """
        name, data = f"{_PROBE}{secrets.token_hex(4)}", secrets.token_bytes(size)
        first, second = os.path.join(self.root, name), os.path.join(self.root, f"{name}-renamed")
        try:
            os.makedirs(first)
            write_file(os.path.join(first, "file"), data)
            sync_tree(first)
            self._rename(first, second)
            forget(os.path.join(second, "file"))
            if LocalFiles(second).read("file") != data:
                raise OSError(errno.EIO, "a file is not read back as it was written")
        finally:
            for left in (first, second):
                with contextlib.suppress(OSError):
                    if os.path.exists(left):
                        shutil.rmtree(left)

    def keep_piece(self, name: str, data: bytes) -> None:
        """Keep a piece of a file of the run directory; the name says its content."""
        path = os.path.join(self.root, _RECORD, name)
        if not os.path.exists(path):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            write_file(path, data)

    def piece(self, name: str) -> bytes:
        """Return a piece that was kept."""
        return read_inside(self.root, f"{_RECORD}/{name}")

    def pieces(self) -> list[str]:
        """Return the names of the pieces that are kept."""
        with contextlib.suppress(FileNotFoundError):
            return [name for name in os.listdir(os.path.join(self.root, _RECORD)) if not name.endswith(".tmp")]
        return []

    def remove_pieces(self, names: Collection[str]) -> None:
        """Delete pieces."""
        for name in names:
            os.remove(os.path.join(self.root, _RECORD, name))

    def _hide(self, step: int, prefix: str) -> str:
        name = f"{prefix}global_step_{step}-{secrets.token_hex(4)}"
        self._rename(self.path(step), os.path.join(self.root, name))
        return name

    def _rename(self, source: str, target: str) -> None:
        """Rename a directory atomically and durably."""
        os.rename(source, target)
        sync_directory(self.root)
