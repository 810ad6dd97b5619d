"""The directory `trainer.ckpt_cache_dir` of one node, for the ranks there. The driver asks them through `NodeDisks`."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import socket
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from trainer.checkpoint import manifest as manifests
from trainer.checkpoint.checkpoint_files import CheckpointFiles, files_at, step_in
from trainer.checkpoint.manifest import CorruptCheckpointError, Fields, FileEntry
from trainer.checkpoint.storage import LocalStorage, for_each
from trainer.checkpoint.store import NODE, LocalStore
from trainer.files.atomic_io import read_file

_PROBLEMS = ".problems.json"
_PARALLEL = 8
_uploads: dict[str, Future] = {}


def is_shard(path: str) -> bool:
    """Return whether a file of a checkpoint holds the shards of a rank; all other files are small."""
    name = os.path.basename(path)
    return name.startswith("__") and name.endswith(".distcp")


@dataclass(frozen=True)
class LocalTier:
    """The directory `root` on the disk of this node. It is plain data, so that it can be sent to a rank.

    Every method raises OSError if the disk fails.
    """

    root: str

    @property
    def _store(self) -> LocalStore:
        return LocalStore(LocalStorage(self.root))

    def _files(self, folder: str) -> CheckpointFiles:
        return files_at(os.path.join(self.root, folder))

    def name(self) -> str:
        """Return the name of this disk: ranks that get the same name see the same directory."""
        path = os.path.join(self.root, NODE)
        with contextlib.suppress(FileNotFoundError):
            return read_file(path).decode()
        os.makedirs(self.root, exist_ok=True)
        own = f"{path}-{secrets.token_hex(4)}"
        with open(own, "w") as file:
            file.write(f"{socket.gethostname()}-{secrets.token_hex(4)}")
        with contextlib.suppress(FileExistsError):  # another rank of this node was faster
            os.link(own, path)
        os.remove(own)
        return read_file(path).decode()

    def clean_up(self) -> None:
        """Test that checkpoints can be written, and remove what interrupted saves and deletions have left."""
        self._store.probe()
        for name in self._store.orphans():
            self._store.remove(name)

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the sizes of the files of a staging area in bytes, by path."""
        return self._files(folder).storage.list()

    def note_problems(self, folder: str, problems: list[str]) -> None:
        """Keep sentences about copies that a staging area lacks, for `problems`."""
        with contextlib.suppress(OSError):
            self._files(folder).write(_PROBLEMS, json.dumps(problems).encode())

    def problems(self, folder: str) -> list[str]:
        """Return what `note_problems` has kept."""
        with contextlib.suppress(FileNotFoundError):
            return json.loads(self._files(folder).read(_PROBLEMS))
        return []

    def read(self, folder: str, paths: Collection[str]) -> dict[str, bytes]:
        """Return the content of small files."""
        files = self._files(folder)
        return {path: files.read(path) for path in paths}

    def keep(self, folder: str, files: Mapping[str, bytes], pieces: Mapping[str, bytes]) -> None:
        """Write small files of a staging area or checkpoint, and pieces of the files of the run directory."""
        target = self._files(folder)
        for path, data in files.items():
            target.write(path, data)
        for name, data in pieces.items():
            self._store.keep_piece(name, data)

    def commit(self, folder: str, step: int, manifest: Fields) -> None:
        """Give a staging area its manifest and the name of the checkpoint, before the disk of the driver does.

        A checkpoint of this step that is there was never committed, or was given up: it is deleted.
        """
        store = self._store
        self._delete(step)
        store.commit(self._files(folder), step, manifest, lambda: None)

    def scrub(self, step: int, digest: str, level: str) -> list[str]:
        """Return the files of a checkpoint that this disk has and that agree with its manifest.

        What does not agree is deleted, so that no rank reads it.

        Args:
            digest: hash of the manifest.
            level: how files are checked (see `trainer.checkpoint.manifest.verify`).
        """
        try:
            checkpoint = manifests.read(self._store.path(step))
            if checkpoint.manifest["self"] != digest:
                raise CorruptCheckpointError(f"{checkpoint.path} belongs to another checkpoint")
        except CorruptCheckpointError:
            self._delete(step)
            return []
        valid = []
        for entry in checkpoint.entries:
            path = os.path.join(checkpoint.path, entry.path)
            if not os.path.exists(path):
                continue
            try:
                manifests.check_entries(checkpoint, [entry], level)
                valid.append(entry.path)
            except CorruptCheckpointError:
                os.remove(path)
        return valid

    def reconcile(self, names: Collection[str], pieces: Collection[str]) -> None:
        """Delete the checkpoints and pieces that the disk of the driver does not have.

        Args:
            names: names of the checkpoints, and of those that are archived.
            pieces: names of the pieces.
        """
        store = self._store
        archived = store.archived()
        for name in store.storage.names():
            step = step_in(name)
            if name not in names and step is not None:
                self._delete(step)
            elif name not in names and name in archived:
                store.remove(name)
        store.remove_pieces([name for name in store.pieces() if name not in pieces])

    def rename(self, name: str, new: str) -> None:
        """Rename a checkpoint, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            LocalStorage(self.root).rename(name, new)

    def remove(self, name: str) -> None:
        """Delete a staging area, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            self._store.remove(name)

    def begin_upload(self, step: int, url: str, paths: Collection[str]) -> str:
        """Begin to copy files of a checkpoint to the staging area at `url`; returns a key for `uploaded`."""
        source, staging = self._store.path(step), files_at(url)

        def upload() -> dict[str, FileEntry]:
            for_each(lambda path: staging.upload(os.path.join(source, path), path), paths, _PARALLEL)
            return staging.written

        key = secrets.token_hex(4)
        pool = ThreadPoolExecutor(1, thread_name_prefix="upload")
        _uploads[key] = pool.submit(upload)
        pool.shutdown(wait=False)
        return key

    def uploaded(self, key: str) -> dict[str, FileEntry] | None:
        """Return the uploaded files by path; None: the upload runs.

        Raises:
            OSError: the store or the disk fails.
        """
        if key not in _uploads:
            raise OSError(errno.ENOENT, "the upload was begun by another process")
        return _uploads.pop(key).result() if _uploads[key].done() else None

    def _delete(self, step: int) -> None:
        store = self._store
        if os.path.exists(store.path(step)):
            store.remove(store.tombstone(step))
