"""Where checkpoints live: a handful of path operations over `str` URLs, through fsspec.

Everything that knows whether a checkpoint lies on a disk or elsewhere is in here.
"""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import secrets

import fsspec

from trainer.durable import digest_bytes, digest_file, forget, read_file, sync_directory, sync_tree, write_file

PROBE = ".probe-"


class Storage:
    """Path operations below one root, a local path or an fsspec URL. All paths are relative to the root."""

    def __init__(self, root: str):
        self.fs, self.root = fsspec.core.url_to_fs(root)
        self.is_local = "file" in _protocols(self.fs)

    def path(self, relative: str = "") -> str:
        """The absolute path of a file or directory, as other writers and readers take it."""
        return posixpath.join(self.root, relative) if relative else self.root

    def exists(self, relative: str) -> bool:
        return self.fs.exists(self.path(relative))

    def list(self) -> list[str]:
        """Names directly below the root; empty when the root does not exist."""
        try:
            entries = self.fs.ls(self.root, detail=False, refresh=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(posixpath.basename(entry.rstrip("/")) for entry in entries)

    def files(self, relative: str = "") -> dict[str, int]:
        """Bytes of every file below a directory, by path relative to it."""
        base = self.path(relative)
        found = self.fs.find(base, detail=True)
        return {posixpath.relpath(path, base): int(info["size"]) for path, info in sorted(found.items())}

    def make(self, relative: str) -> None:
        self.fs.makedirs(self.path(relative), exist_ok=True)

    def probe(self, size: int = 64) -> None:
        """Try all that a save does: make a directory, write a file durably, rename, read back, remove.

        Args:
            size: bytes of the file; they are read back from the disk where the system can be made to.

        Raises:
            OSError: something of it failed.
        """
        name, data = f"{PROBE}{secrets.token_hex(4)}", secrets.token_bytes(size)
        try:
            self.make(name)
            self.write(f"{name}/file", data)
            self.sync(name)
            self.rename(name, f"{name}-renamed")
            if self.is_local:
                forget(self.path(f"{name}-renamed/file"))
            if self.read(f"{name}-renamed/file") != data:
                raise OSError(errno.EIO, "a file is not read back as it was written")
        finally:
            for left in (name, f"{name}-renamed"):
                with contextlib.suppress(OSError):
                    if self.exists(left):
                        self.remove(left)

    def read(self, relative: str) -> bytes:
        """The content of a file; on a disk, of a regular file that is no link."""
        if self.is_local:
            return read_file(self.path(relative))
        with self.fs.open(self.path(relative), "rb") as file:
            return file.read()

    def write(self, relative: str, data: bytes) -> None:
        """Write a small file, durably: it is there whole, or not at all, after a crash."""
        target = self.path(relative)
        if self.is_local:
            os.makedirs(posixpath.dirname(target), exist_ok=True)
            write_file(target, data)
        else:  # an object appears with its last byte
            with self.fs.open(target, "wb") as file:
                file.write(data)

    def digest(self, relative: str) -> str:
        """xxh3-128 of a file's content."""
        if self.is_local:
            return digest_file(self.path(relative))
        return digest_bytes(self.read(relative))

    def sync(self, relative: str) -> None:
        """Make every file below a directory durable (objects are, once written)."""
        if self.is_local:
            sync_tree(self.path(relative))

    def rename(self, source: str, target: str) -> None:
        """Move a directory; on a disk in one step, so that it has one of the two names at any instant."""
        assert not self.exists(target), target
        if self.is_local:
            os.rename(self.path(source), self.path(target))
            sync_directory(self.root)
        else:
            self.fs.mv(self.path(source), self.path(target), recursive=True)

    def remove(self, relative: str) -> None:
        self.fs.rm(self.path(relative), recursive=True)


def _protocols(fs: fsspec.AbstractFileSystem) -> tuple[str, ...]:
    return (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)
