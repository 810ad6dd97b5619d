"""Two tiers: a save is committed on the local disks, and an object store gets it while training continues.

A checkpoint is found in the tier where it is complete. Nothing is deleted before something newer is safe above: the
newest checkpoint of the object store stays, and so does every newer one of the disks, until the next is uploaded.
A node that is lost with its disk costs what had neither been uploaded nor copied to a neighbour. What happens on the
disks of several nodes is in `nodes`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor

from trainer.checkpoint import manifest as manifests
from trainer.checkpoint.local_store import LocalFiles, LocalStore
from trainer.checkpoint.local_tier import NodeDisk
from trainer.checkpoint.lock import RunLock
from trainer.checkpoint.manifest import Checkpoint, CorruptCheckpointError, FileEntry
from trainer.checkpoint.object_store import ObjectFiles, ObjectStore
from trainer.checkpoint.replica_ranks import AskedRanks, Nodes
from trainer.checkpoint.store import CheckpointStore, open_store
from trainer.files.documents import parse_object
from trainer.process.failpoints import failpoint
from trainer.process.failure_log import INCIDENTS, INFRASTRUCTURE, Incident

LOG = logging.getLogger(__name__)

_PARALLEL = 8
_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 60.0
_LOCAL, _ABOVE = "local/", "above/"


def open_tiers(ckpt_path: str, local_dir: str | None, copies: int = 0) -> CheckpointStore:
    """Return the store at `ckpt_path`, below it the directory `local_dir` if there is one.

    Args:
        copies: the number of other nodes whose disks also get each rank's shards.
    """
    store = open_store(ckpt_path)
    if local_dir is None:
        return store
    assert isinstance(store, ObjectStore), ckpt_path
    return TieredStore(LocalStore(local_dir), store, copies)


class TieredStore:
    """Checkpoints on the disks of this node and of the ranks' nodes, and above them in an object store."""

    keeps_record = True

    def __init__(self, local: LocalStore, above: ObjectStore, copies: int = 0):
        self.root = above.root
        self._local = local
        self._above = above
        self._copies = copies
        self._nodes: Nodes | None = None
        self._lost: set[int] = set()  # steps whose local checkpoints lack shards
        self._copied_pieces: set[str] = set()
        self._safe: set[int] | None = None
        self._remains: dict[str, list[str]] = {}
        self._pieces: set[str] = set()
        self._committed: dict[int, float] = {}
        self._fence: Callable[[], None] = lambda: None
        self._lock_above: RunLock | None = None
        self._moves = threading.Lock()  # held while a step enters or leaves a tier
        self._wake = threading.Event()
        self._ending = threading.Event()
        self._uploader: threading.Thread | None = None
        self._problem = ""

    # ---------------------------------------------------------------------------------------------------
    # The interface of a store

    def exists(self) -> bool:
        """Return whether the place exists: a prefix always does."""
        return True

    def lock(self, timeout_s: float, name: str, remedy: str) -> _Locks:
        """Return the locks of both tiers, not yet taken."""
        own, self._lock_above = (tier.lock(timeout_s, name, remedy) for tier in (self._local, self._above))
        return _Locks(own, self._lock_above)

    def names(self) -> list[str]:
        """Return all names in both tiers."""
        return sorted({*self._local.names(), *self._above.names()})

    def steps(self) -> list[int]:
        """Return the steps that are committed in a tier, ascending."""
        return sorted({*self._local.steps(), *self._steps_above()})

    def path(self, step: int) -> str:
        """Return the path of the checkpoint of a step, in the nearest tier that has it."""
        return next(iter(self.places(step)), self._local.path(step))

    def places(self, step: int) -> list[str]:
        """Return where the checkpoint of a step may be, the nearest first."""
        near = [self._local.path(step)] if step in self._local.steps() and step not in self._lost else []
        far = [self._above.path(step)] if step in self._steps_above() else []
        return [*near, *far]

    def begin(self, step: int) -> LocalFiles:
        """Make an empty draft on the disk."""
        return dataclasses.replace(self._local.begin(step), copies=self._copies)

    def publish(self, draft: LocalFiles, step: int, manifest: bytes, before_commit: Callable[[], None]) -> None:
        """Commit a draft on the disk, and have it uploaded."""
        if self._nodes is None:
            for entry in parse_object(manifest)["files"]:
                if not os.path.exists(os.path.join(draft.path, entry["path"])):
                    raise OSError(errno.ENOENT, f"trainer.ckpt_cache_dir={self._local.root}: not there", entry["path"])
            self._local.publish(draft, step, manifest, before_commit)
        else:
            self._fence()  # the other nodes commit before `before_commit` is called
            new = [name for name in self._local.pieces() if name not in self._copied_pieces]
            pieces = {name: self._local.piece(name) for name in new}
            problems = self._nodes.publish(draft, step, manifest, pieces, before_commit)
            self._copied_pieces.update(new)
            self._check_copies(step, problems)
        self._lost.discard(step)
        self._committed[step] = time.monotonic()
        self._wake.set()

    def discard(self, draft: LocalFiles) -> None:
        """Delete a draft."""
        if self._nodes is not None:
            self._nodes.discard(draft)
        self._local.discard(draft)

    def unsafe(self) -> set[int]:
        """Return the steps that must stay until a newer one is uploaded. If uploads fail, no save deletes any above."""
        newest = max(self._steps_above(), default=-1)
        above = self._steps_above() if self._problem else ()
        return {newest, *above, *(step for step in self._local.steps() if step > newest)}

    def withdraw(self, step: int) -> str:
        """Take a checkpoint out of service in both tiers; returns a name of its remains, for `remove`.

        Raises:
            OSError: the object store is out of service. Nothing has changed.
        """
        name = f"global_step_{step}"
        with self._moves:
            remains, is_above = [], step in self._steps_above()
            if is_above:
                self._check_above()
            if step in self._local.steps():
                remains.append(_LOCAL + self._local.withdraw(step))
            if is_above:
                remains.append(_ABOVE + self._above.withdraw(step))
                self._safe = self._steps_above() - {step}
        self._remains[name] = remains
        return name

    def set_aside(self, step: int) -> str:
        """Take a checkpoint out of service in both tiers and keep it; returns a new name."""
        name = ""
        with self._moves:
            if step in self._steps_above():
                self._check_above()
                name = _ABOVE + self._above.set_aside(step)
                self._safe = self._steps_above() - {step}
            if step in self._local.steps():
                hidden = self._local.set_aside(step)
                if self._nodes is not None:
                    self._nodes.rename(os.path.basename(self._local.path(step)), hidden)
                name = _LOCAL + hidden
        return name

    def asides(self, step: int | None = None) -> list[str]:
        """Return the names of checkpoints that were set aside: of any step, or those of this step on the disk.

        Those of a step in the object store are deleted when it is uploaded again: a save asks nothing of the store.
        """
        local = [_LOCAL + name for name in self._local.asides(step)]
        return local if step is not None else local + [_ABOVE + name for name in self._above.asides()]

    def revoke(self) -> None:
        """Let no other job commit what it has begun (see `ObjectStore.revoke`)."""
        self._above.revoke()

    def leftovers(self) -> dict[str, str]:
        """Return the names of the leftovers of interrupted operations, and the kind of each."""
        local = {_LOCAL + name: kind for name, kind in self._local.leftovers().items()}
        return local | {_ABOVE + name: kind for name, kind in self._above.leftovers().items()}

    def remove(self, name: str) -> None:
        """Delete what `leftovers`, `withdraw` or `asides` names."""
        for part in self._remains.pop(name, [name]):
            if part.startswith(_LOCAL):
                self._local.remove(part.removeprefix(_LOCAL))
            else:
                self._above.remove(part.removeprefix(_ABOVE))
        if self._nodes is not None:
            self._nodes.settle()

    def hint(self, step: int) -> None:
        """Write the newest step of the disk to a file for people and tools."""
        self._local.hint(step)

    def probe(self, size: int = 64) -> None:
        """Test the operations of a save in both tiers."""
        self._local.probe(size)
        self._above.probe(size)

    def keep_piece(self, name: str, data: bytes) -> None:
        """Keep a piece of a file of the run directory on the disk; it is uploaded with the next checkpoint."""
        self._local.keep_piece(name, data)

    def piece(self, name: str) -> bytes:
        """Return a piece that was kept in one of the tiers."""
        with contextlib.suppress(FileNotFoundError):
            return self._local.piece(name)
        return self._above.piece(name)

    def pieces(self) -> list[str]:
        """Return the names of the pieces that are kept in a tier."""
        return sorted({*self._local.pieces(), *self._above.pieces()})

    def remove_pieces(self, names: Collection[str]) -> None:
        """Delete pieces in both tiers."""
        self._local.remove_pieces([name for name in self._local.pieces() if name in names])
        self._above.remove_pieces(names)

    # ---------------------------------------------------------------------------------------------------
    # Several nodes

    def connect(self, ranks: AskedRanks | None) -> None:
        """Reach the disks of the nodes through these ranks, which are connected; None: the ranks are about to end.

        Raises:
            UserError: a node cannot keep checkpoints.
        """
        self._nodes, self._copied_pieces = None, set()
        if ranks is None:
            return
        nodes = Nodes(self._local, ranks)
        if self._copies and len(nodes.with_ranks) == 1:
            self._report(
                "the ranks see one directory, that of one node: their shards have no copies until ranks on other nodes "
                f"join (trainer.ckpt_replicas={self._copies})"
            )
        if nodes.are_several:
            self._nodes = nodes
        self._wake.set()

    def missing(self, checkpoint: Checkpoint, level: str) -> list[str]:
        """Return the files of a checkpoint that no rank can read; if there are some, its local copy is not used again.

        Args:
            level: how shards of several nodes are checked (see `trainer.checkpoint.manifest.verify`). Damaged ones are
                deleted, so that no rank reads them.
        """
        if checkpoint.path != self._local.path(checkpoint.step):
            return []
        if self._nodes is not None:
            missing = self._nodes.missing(checkpoint, level)
        elif checkpoint.nodes:
            held = NodeDisk(self._local.root).survey(checkpoint.step, checkpoint.manifest["self"], level)
            missing = [entry.path for entry in checkpoint.entries if entry.path not in held]
        else:
            missing = [e.path for e in checkpoint.entries if not os.path.exists(os.path.join(checkpoint.path, e.path))]
        if missing:
            self._lost.add(checkpoint.step)
        return missing

    def _check_copies(self, step: int, problems: list[str]) -> None:
        """Say which shards of a commit have too few copies."""
        assert self._nodes is not None
        checkpoint = manifests.read(self._local.path(step))
        held = Counter(path for paths in checkpoint.nodes.values() for path in paths)
        wanted = 1 + min(self._copies, len(self._nodes.with_ranks) - 1)
        too_few = sorted(path for path, count in held.items() if count < wanted)
        if too_few:
            reasons = "; ".join(problems) or "their ranks are all on one node"
            self._report(f"{checkpoint.path}: {', '.join(too_few)} could not be copied to a neighbour: {reasons}")

    def _report(self, text: str) -> None:
        LOG.warning("%s", text)
        node, cause, action = socket.gethostname(), "missing copies", "continued without copies"
        INCIDENTS.record(
            Incident(INCIDENTS.step, "checkpoint", "copies", node, INFRASTRUCTURE, cause, action, 0.0, text)
        )

    # ---------------------------------------------------------------------------------------------------
    # Uploading

    def start(self, fence: Callable[[], None]) -> None:
        """Begin to upload what is on the disk alone, and what is committed from now on.

        Args:
            fence: raises if this process may no longer write to the store.
        """
        self._fence = fence
        now = time.monotonic()
        self._committed = dict.fromkeys(self._missing_above(), now)
        self._wake.set()
        self._uploader = threading.Thread(target=self._upload_all, name="uploader", daemon=True)
        self._uploader.start()

    def lag(self) -> float | None:
        """Return the seconds for which the oldest checkpoint that is newer than all above has waited; 0: none waits."""
        newest, now = max(self._steps_above(), default=-1), time.monotonic()
        since = [committed for step, committed in list(self._committed.items()) if step > newest]
        return now - min(since) if since else 0.0

    def finish(self, timeout_s: float) -> None:
        """Wait until the newest checkpoint is uploaded, and end the uploads."""
        if self._uploader is None:
            return
        missing = [step for step in self._ready() if step in self.unsafe()]
        if missing:
            LOG.info("waiting up to %g s until global_step_%d is in %s", timeout_s, missing[-1], self.root)
            deadline = time.monotonic() + timeout_s
            while missing[-1] not in self._steps_above() and time.monotonic() < deadline:
                time.sleep(0.1)
        self._ending.set()
        self._wake.set()
        left = [step for step in self._missing_above() if step in self.unsafe()]
        if left:
            reason = f"the upload took longer than trainer.ckpt_upload_timeout_s={timeout_s:g}"
            if left[-1] not in self._ready():
                reason = "parts of it are on nodes whose ranks have ended"
            LOG.warning(
                "global_step_%d is in %s alone, not in %s (%s); the same command on this machine uploads it",
                left[-1],
                self._local.root,
                self.root,
                self._problem or reason,
            )
        else:
            self._uploader.join()
        self._uploader = None

    def _steps_above(self) -> set[int]:
        """Return the steps in the object store. This process holds its lock, so the store is asked once."""
        if self._safe is None:
            self._safe = set(self._above.steps())
        return self._safe

    def _missing_above(self) -> list[int]:
        return [step for step in self._local.steps() if step not in self._steps_above() and step not in self._lost]

    def needs_ranks(self) -> bool:
        """Return whether what is not uploaded yet is on the disks of other nodes, which only ranks reach."""
        return any(step in self.unsafe() and self._is_apart(step) for step in self._missing_above())

    def _is_apart(self, step: int) -> bool:
        """Return whether shards of a checkpoint are on the disks of other nodes alone."""
        try:
            checkpoint = manifests.read(self._local.path(step))
        except CorruptCheckpointError:
            return False
        return any(
            not os.path.exists(os.path.join(checkpoint.path, path))
            for paths in checkpoint.nodes.values()
            for path in paths
        )

    def _ready(self) -> list[int]:
        """Return the steps that can be uploaded now."""
        return [step for step in self._missing_above() if self._nodes is not None or not self._is_apart(step)]

    def _upload_all(self) -> None:
        wait_s = _FIRST_WAIT_S
        while True:
            self._wake.wait()
            self._wake.clear()
            while missing := self._ready():
                if self._ending.is_set() and missing[-1] not in self.unsafe():
                    return
                try:
                    self._upload(missing[-1])  # the newest first: it makes the most safe
                except Exception as error:
                    if missing[-1] not in self._local.steps():
                        continue  # it was set aside meanwhile
                    self._problem = str(error)
                    LOG.warning("global_step_%d is not uploaded yet: %s", missing[-1], error)
                    if self._ending.wait(wait_s):
                        return
                    wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
                else:
                    self._problem, wait_s = "", _FIRST_WAIT_S
            if self._ending.is_set():
                return

    def _upload(self, step: int) -> None:
        """Copy a checkpoint of the disk to the object store, and commit it there.

        Raises:
            DamagedError: a file on the disk does not have the content that was saved.
            OSError: the store fails, or the checkpoint is gone.
        """
        checkpoint = manifests.read(self._local.path(step))
        self._check_above()
        self._upload_pieces()
        draft, nodes = self._above.begin(step), self._nodes
        away = [e for e in checkpoint.entries if not os.path.exists(os.path.join(checkpoint.path, e.path))]
        try:
            with ThreadPoolExecutor(_PARALLEL) as pool:
                here = (entry for entry in checkpoint.entries if entry not in away)
                copying = pool.map(lambda entry: _copy(checkpoint, entry, draft), here)
                if away and nodes is not None:
                    draft.written.update(nodes.upload(checkpoint, draft.path, [entry.path for entry in away]))
                for _ in copying:
                    pass
            for entry in checkpoint.entries:
                if draft.written.get(entry.path) != (entry.bytes, entry.hash):
                    source = os.path.join(checkpoint.path, entry.path)
                    raise CorruptCheckpointError(f"{source}: does not have the content that was saved")
            failpoint("upload:copied")
            content = manifests.content_of(checkpoint.manifest)
            content.pop("nodes", None)
            data = manifests.dump({**content, "folder": draft.folder}, checkpoint.entries)
            with self._moves:
                if step not in self._local.steps():
                    raise FileNotFoundError(errno.ENOENT, "it was set aside", checkpoint.path)
                self._above.publish(draft, step, data, self._check_above)
                self._safe = self._steps_above() | {step}
        except BaseException:
            with contextlib.suppress(OSError):
                self._above.discard(draft)
            raise
        self._committed.pop(step, None)
        failpoint("upload:published")
        with contextlib.suppress(OSError):
            self._above.hint(step)
            for name in self._above.asides(step):
                self._above.remove(name)
        LOG.info("uploaded %s to %s", checkpoint.path, self._above.path(step))

    def _check_above(self) -> None:
        """Check that this process may write to the object store (see `_Locks.check`)."""
        self._fence()
        if self._lock_above is not None:
            self._lock_above.check()

    def _upload_pieces(self) -> None:
        new = [name for name in self._local.pieces() if name not in self._pieces]
        with ThreadPoolExecutor(_PARALLEL) as pool:
            for _ in pool.map(lambda name: self._above.keep_piece(name, self._local.piece(name)), new):
                pass
        self._pieces.update(new)


class _Locks(RunLock):
    """The locks of both tiers, which are held together."""

    def __init__(self, own: RunLock, above: RunLock):
        self._own = own
        self._above = above

    def acquire(self, wait: bool = False) -> str | None:
        taken_from = self._own.acquire(wait)
        try:
            also = self._above.acquire(wait)
            return taken_from or also
        except BaseException:
            self._own.release()
            raise

    def check(self) -> None:
        """Check the lock of the disk, and what the last heartbeat has seen of the other one.

        The object store may be out of service while checkpoints are committed on the disk. Before anything is written
        or deleted there, `TieredStore` checks its lock, too.
        """
        self._own.check()
        self._above.check_last_beat()

    def release(self) -> None:
        self._above.release()
        self._own.release()


def _copy(checkpoint: Checkpoint, entry: FileEntry, draft: ObjectFiles) -> None:
    draft.upload(os.path.join(checkpoint.path, entry.path), entry.path)
