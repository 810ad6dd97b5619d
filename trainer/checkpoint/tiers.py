"""Two tiers: a local store, in which a save is committed, with an upload queue to a remote store.

A checkpoint is found in the tier where it is complete. Nothing is deleted before something newer is in the remote
store: its newest checkpoint stays, and so does every newer one of the disks, until the next is uploaded. A node that is
lost with its disk costs what had neither been uploaded nor copied to another node. What happens on the disks of several
nodes is in `replica_ranks`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os
from collections import Counter
from collections.abc import Callable, Collection

from trainer.checkpoint import manifest as manifests
from trainer.checkpoint.checkpoint_files import CheckpointFiles
from trainer.checkpoint.local_tier import LocalTier
from trainer.checkpoint.lock import RunLock
from trainer.checkpoint.manifest import Checkpoint, CorruptCheckpointError, Fields
from trainer.checkpoint.replica_ranks import AskedRanks, NodeDisks
from trainer.checkpoint.storage import LocalStorage
from trainer.checkpoint.store import CheckpointStore, LocalStore, open_store
from trainer.checkpoint.upload_queue import UploadQueue
from trainer.process.failpoints import failpoint
from trainer.process.failure_log import INCIDENTS

LOG = logging.getLogger(__name__)


def open_tiers(ckpt_path: str, local_dir: str | None, replicas: int = 0) -> CheckpointStore:
    """Return the store at `ckpt_path`, below it the directory `local_dir` if there is one.

    Args:
        replicas: the number of other nodes whose disks also get each rank's shards.
    """
    store = open_store(ckpt_path)
    if local_dir is None:
        return store
    assert store.storage.disk is None, ckpt_path
    return TieredStore(LocalStore(LocalStorage(local_dir)), store, replicas)


class TieredStore(CheckpointStore):
    """Checkpoints on the disks of this node and of the ranks' nodes, and in a remote store."""

    def __init__(self, local: LocalStore, remote: CheckpointStore, replicas: int = 0):
        super().__init__(remote.storage)
        self._local = local
        self._remote = remote
        self._replicas = replicas
        self._uploads = self.uploads = UploadQueue(local, remote)
        self.tiers = [local, remote]

    def locks(self, lease_s: float, name: str, remedy: str) -> list[RunLock]:
        """Return the locks of both tiers, not yet taken.

        The remote store may be out of service while checkpoints are committed on the disk. So a save checks what the
        last heartbeat has seen of its lock. Before anything is written or deleted there, the lock itself is checked.
        """
        self._uploads.lock = RunLock(self.root, lease_s, name, remedy, trusts_heartbeat=True)
        return [*self._local.locks(lease_s, name, remedy), self._uploads.lock]

    def steps(self) -> list[int]:
        return sorted({*self._local.steps(), *self._uploads.uploaded()})

    def path(self, step: int) -> str:
        """Return the path of the checkpoint of a step, in the nearest tier that has it."""
        return next(iter(self.locations(step)), self._local.path(step))

    def locations(self, step: int) -> list[str]:
        near = [self._local.path(step)] if self._uploads.readable(step) else []
        return near + ([self._remote.path(step)] if step in self._uploads.uploaded() else [])

    def begin(self, step: int) -> CheckpointFiles:
        return dataclasses.replace(self._local.begin(step), replicas=self._replicas)

    def commit(self, staging: CheckpointFiles, step: int, manifest: Fields, before_commit: Callable[[], None]) -> None:
        """Commit a staging area on the disk, and have it uploaded."""
        if (nodes := self._uploads.nodes) is None:
            for entry in manifest["files"]:
                if not os.path.exists(os.path.join(staging.path, entry["path"])):
                    raise OSError(errno.ENOENT, f"trainer.ckpt_cache_dir={self._local.root}: not there", entry["path"])
            self._local.commit(staging, step, manifest, before_commit)
        else:
            self._uploads.fence()  # the other nodes commit before `before_commit` is called
            problems = nodes.commit(staging, step, manifest, before_commit)
            self._check_replicas(nodes, step, problems)
        self._uploads.add(step)

    def abort(self, staging: CheckpointFiles) -> None:
        if self._uploads.nodes is not None:
            self._uploads.nodes.abort(staging)
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
        self._reconcile()

    def archive(self, step: int) -> str:
        name = ""
        with self._uploads.moving:
            if step in self._uploads.uploaded():
                self._uploads.check()
                name = self._remote.archive(step)
            if step in self._local.steps():
                name = self._local.archive(step)
                if self._uploads.nodes is not None:
                    self._uploads.nodes.rename(os.path.basename(self._local.path(step)), name)
            self._uploads.remove(step)
        return name

    def archived(self, step: int | None = None) -> list[str]:
        """Return the names of archived checkpoints: of any step, or those of this step on the disk.

        Those of a step in the remote store are deleted when it is uploaded again: a save asks nothing of that store.
        """
        local = self._local.archived(step)
        return local if step is not None else local + self._remote.archived()

    def remove(self, name: str) -> None:
        """Delete an archived checkpoint on the disks."""
        self._local.remove(name)
        self._reconcile()

    def write_latest(self, step: int) -> None:
        """Write the newest step of the disk to a file for people and tools."""
        self._local.write_latest(step)

    def probe(self, size: int = 64) -> None:
        self._local.probe(size)
        self._remote.probe(size)

    def keep_piece(self, name: str, data: bytes) -> None:
        """Keep a piece of a file of the run directory on the disk; it is uploaded with the next checkpoint."""
        self._local.keep_piece(name, data)

    def add_file(self, step: int, name: str, data: bytes) -> None:
        """Add a file to a checkpoint on the disk, then in the remote store, unless it is still to be uploaded."""
        if self._uploads.readable(step):
            with contextlib.suppress(CorruptCheckpointError):
                self._local.add_file(step, name, data)
        with self._uploads.moving:
            if step in self._uploads.uploaded():
                self._uploads.check()
                self._uploads.upload_pieces()
                self._remote.add_file(step, name, data)

    def piece(self, name: str) -> bytes:
        with contextlib.suppress(FileNotFoundError):
            return self._local.piece(name)
        return self._remote.piece(name)

    def pieces(self) -> list[str]:
        return sorted({*self._local.pieces(), *self._remote.pieces()})

    def remove_pieces(self, names: Collection[str]) -> None:
        self._local.remove_pieces([name for name in self._local.pieces() if name in names])
        self._remote.remove_pieces(names)

    # ---------------------------------------------------------------------------------------------------
    # Several nodes

    def connect(self, ranks: AskedRanks | None) -> None:
        """Reach the disks of the nodes through these ranks, which are connected; None: the ranks are about to end.

        Raises:
            UserError: a node cannot keep checkpoints.
        """
        self._uploads.nodes = None
        if ranks is None:
            return
        nodes = NodeDisks(self._local, ranks)
        if self._replicas and len(nodes.with_ranks) == 1:
            self._report(
                "the ranks see one directory, that of one node: their shards have no copies until ranks on other nodes "
                f"join (trainer.ckpt_replicas={self._replicas})"
            )
        if nodes.are_several:
            self._uploads.nodes = nodes
        self._uploads.wake()

    def missing(self, checkpoint: Checkpoint, level: str) -> list[str]:
        """Return the files of a checkpoint that no rank can read; if there are some, its local copy is not used again.

        Args:
            level: how shards of several nodes are checked (see `trainer.checkpoint.manifest.verify`). Damaged ones are
                deleted, so that no rank reads them.
        """
        if checkpoint.path != self._local.path(checkpoint.step):
            return []
        if self._uploads.nodes is not None:
            missing = self._uploads.nodes.missing(checkpoint, level)
        elif checkpoint.nodes:
            held = LocalTier(self._local.root).scrub(checkpoint.step, checkpoint.manifest["self"], level)
            missing = [entry.path for entry in checkpoint.entries if entry.path not in held]
        else:
            missing = [e.path for e in checkpoint.entries if not os.path.exists(os.path.join(checkpoint.path, e.path))]
        if missing:
            self._uploads.lose(checkpoint.step)
        return missing

    def _reconcile(self) -> None:
        if self._uploads.nodes is not None:
            self._uploads.nodes.reconcile()

    def _check_replicas(self, nodes: NodeDisks, step: int, problems: list[str]) -> None:
        """Say which shards of a commit have too few copies."""
        checkpoint = manifests.read(self._local.path(step))
        held = Counter(path for paths in checkpoint.nodes.values() for path in paths)
        wanted = 1 + min(self._replicas, len(nodes.with_ranks) - 1)
        too_few = sorted(path for path, count in held.items() if count < wanted)
        if too_few:
            reasons = "; ".join(problems) or "their ranks are all on one node"
            self._report(f"{checkpoint.path}: {', '.join(too_few)} could not be copied to another node: {reasons}")

    def _report(self, text: str) -> None:
        LOG.warning("%s", text)
        INCIDENTS.note("checkpoint", "copies", "missing copies", "continued without copies", text)
