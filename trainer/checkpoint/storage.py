"""Where checkpoints live: a handful of path operations over `str` URLs, through fsspec."""

from __future__ import annotations

import os
import posixpath

import fsspec


class Storage:
    """Path operations below one root, a local path or an fsspec URL. All paths are relative to the root."""

    def __init__(self, root: str):
        self.fs, self.root = fsspec.core.url_to_fs(root)
        self.is_local = "file" in _protocols(self.fs)

    def path(self, relative: str = "") -> str:
        """The absolute path that DCP and other writers use."""
        return posixpath.join(self.root, relative) if relative else self.root

    def exists(self, relative: str) -> bool:
        return self.fs.exists(self.path(relative))

    def list(self) -> list[str]:
        """Names directly below the root; empty when the root does not exist."""
        if not self.fs.isdir(self.root):
            return []
        return sorted(posixpath.basename(entry.rstrip("/")) for entry in self.fs.ls(self.root, detail=False))

    def files(self, relative: str) -> dict[str, int]:
        """Bytes of every file below a directory, by path relative to it."""
        base = self.path(relative)
        found = self.fs.find(base, detail=True)
        return {posixpath.relpath(path, base): int(info["size"]) for path, info in sorted(found.items())}

    def make(self, relative: str) -> None:
        self.fs.makedirs(self.path(relative), exist_ok=True)

    def read(self, relative: str) -> str:
        with self.fs.open(self.path(relative), "r") as file:
            return file.read()

    def write(self, relative: str, text: str) -> None:
        """Write a small file; on a local disk it is there whole, or not at all, after a crash."""
        target = self.path(relative)
        if not self.is_local:
            with self.fs.open(target, "w") as file:
                file.write(text)
            return
        staged = f"{target}.tmp"
        with open(staged, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(staged, target)
        _sync_directory(os.path.dirname(target))

    def sync(self, relative: str) -> None:
        """Make every file below a directory durable (object stores are already)."""
        if not self.is_local:
            return
        base = self.path(relative)
        for folder, _, names in os.walk(base):
            for name in names:
                handle = os.open(os.path.join(folder, name), os.O_RDONLY)
                try:
                    os.fsync(handle)
                finally:
                    os.close(handle)
            _sync_directory(folder)

    def rename(self, source: str, target: str) -> None:
        self.fs.mv(self.path(source), self.path(target), recursive=True)
        if self.is_local:
            _sync_directory(self.root)

    def remove(self, relative: str) -> None:
        self.fs.rm(self.path(relative), recursive=True)


def _protocols(fs: fsspec.AbstractFileSystem) -> tuple[str, ...]:
    return (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)


def _sync_directory(path: str) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
