"""Two tiers: a local store, in which a save is committed, with an upload queue to a remote store.

A checkpoint is found in the tier where it is valid. Nothing is deleted before something newer is in the remote store:
its newest checkpoint stays, and so does every newer one of the local store, until the next is uploaded. A machine that
is lost with its disk costs what had not been uploaded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection

from trainer.checkpoint.checkpoint_files import CheckpointFiles
from trainer.checkpoint.lock import RunLock
from trainer.checkpoint.manifest import Fields
from trainer.checkpoint.storage import LocalStorage
from trainer.checkpoint.store import CheckpointStore, LocalStore, open_store
from trainer.checkpoint.upload_queue import UploadQueue
from trainer.process.failpoints import failpoint


def open_tiers(ckpt_path: str, local_dir: str | None) -> CheckpointStore:
    """Return the store at `ckpt_path`, above it the directory `local_dir` if there is one."""
    store = open_store(ckpt_path)
    return store if local_dir is None else TieredStore(LocalStore(LocalStorage(local_dir)), store)


class TieredStore(CheckpointStore):
    """Checkpoints in a directory, and in a remote store."""

    def __init__(self, local: LocalStore, remote: CheckpointStore):
        super().__init__(remote.storage)
        self._local = local
        self._remote = remote
        self._uploads = self.uploads = UploadQueue(local, remote)
        self.tiers = [local, remote]

    def locks(self, lease_s: float, name: str, remedy: str) -> list[RunLock]:
        """Return the locks of both tiers, not yet taken.

        The remote store may be out of service while checkpoints are committed in the directory. So a save checks what
        the last heartbeat has seen of its lock. Before anything is written or deleted there, the lock itself is
        checked.
        """
        self._uploads.lock = RunLock(self.root, lease_s, name, remedy, trusts_heartbeat=True)
        return [*self._local.locks(lease_s, name, remedy), self._uploads.lock]

    def steps(self) -> list[int]:
        return sorted({*self._local.steps(), *self._uploads.uploaded()})

    def path(self, step: int) -> str:
        """Return the path of the checkpoint of a step, in the nearest tier that has it."""
        return next(iter(self.locations(step)), self._local.path(step))

    def locations(self, step: int) -> list[str]:
        tiers = [(self._local, self._local.steps()), (self._remote, self._uploads.uploaded())]
        return [tier.path(step) for tier, steps in tiers if step in steps]

    def begin(self, step: int) -> CheckpointFiles:
        return self._local.begin(step)

    def commit(self, staging: CheckpointFiles, step: int, manifest: Fields, before_commit: Callable[[], None]) -> None:
        """Commit a staging area in the directory, and have it uploaded."""
        self._local.commit(staging, step, manifest, before_commit)
        self._uploads.add(step)

    def abort(self, staging: CheckpointFiles) -> None:
        self._local.abort(staging)

    def delete(self, step: int) -> None:
        """Delete a checkpoint in both tiers.

        Raises:
            OSError: the remote store is out of service. Nothing has changed.
        """
        orphans: list[tuple[CheckpointStore, str]] = []
        with self._uploads.moving:
            is_uploaded = step in self._uploads.uploaded()
            if is_uploaded:
                self._uploads.check()
            if step in self._local.steps():
                orphans.append((self._local, self._local.tombstone(step)))
            if is_uploaded:
                orphans.append((self._remote, self._remote.tombstone(step)))
            self._uploads.remove(step)
        failpoint("save:deleting")
        for tier, name in orphans:
            tier.remove(name)

    def archive(self, step: int) -> str:
        name = ""
        with self._uploads.moving:
            if step in self._uploads.uploaded():
                self._uploads.check()
                name = self._remote.archive(step)
            if step in self._local.steps():
                name = self._local.archive(step)
            self._uploads.remove(step)
        return name

    def archived(self, step: int | None = None) -> list[str]:
        """Return the names of archived checkpoints: of any step, or those of this step in the directory.

        Those of a step in the remote store are deleted when it is uploaded again: a save asks nothing of that store.
        """
        local = self._local.archived(step)
        return local if step is not None else local + self._remote.archived()

    def remove(self, name: str) -> None:
        """Delete an archived checkpoint in the directory."""
        self._local.remove(name)

    def write_latest(self, step: int) -> None:
        """Write the newest step of the directory to a file for people and tools."""
        self._local.write_latest(step)

    def probe(self, size: int = 64) -> None:
        self._local.probe(size)
        self._remote.probe(size)

    def keep_piece(self, name: str, data: bytes) -> None:
        """Keep a piece of a file of the run directory; it is uploaded with the next checkpoint."""
        self._local.keep_piece(name, data)

    def piece(self, name: str) -> bytes:
        with contextlib.suppress(FileNotFoundError):
            return self._local.piece(name)
        return self._remote.piece(name)

    def pieces(self) -> list[str]:
        return sorted({*self._local.pieces(), *self._remote.pieces()})

    def remove_pieces(self, names: Collection[str]) -> None:
        self._local.remove_pieces([name for name in self._local.pieces() if name in names])
        self._remote.remove_pieces(names)
