"""Two tiers: a local store, in which a save is committed, and a queue that uploads to a remote store on a thread.

A checkpoint is found in the tier where it is valid. Nothing is deleted before something newer is in the remote store:
its newest checkpoint stays, and so does every newer one of the local store, until the next is uploaded. A machine that
is lost with its disk costs what had not been uploaded.

What lies in the two stores is the truth, and a start derives the queue from it. While this process holds the locks, it
remembers which steps are uploaded, so that the remote store is asked once.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import posixpath
import threading
import time
from collections.abc import Callable, Collection

from trainer.checkpoint import manifest as manifests
from trainer.checkpoint.lock import RunLock
from trainer.checkpoint.manifest import CorruptCheckpointError, Fields
from trainer.checkpoint.storage import LocalStorage, Storage, for_each
from trainer.checkpoint.store import CheckpointStore, LocalStore, open_store
from trainer.process import time_limits
from trainer.process.failpoints import failpoint
from trainer.process.tracing import TRACER

LOG = logging.getLogger(__name__)

_PARALLEL = 8


def open_tiers(ckpt_path: str, local_dir: str | None) -> CheckpointStore:
    """Return the store at `ckpt_path`, above it the directory `local_dir` if there is one."""
    store = open_store(ckpt_path)
    return store if local_dir is None else TieredStore(LocalStore(LocalStorage(local_dir)), store)


class TieredStore(CheckpointStore):
    """Checkpoints in a directory, of which a queue of uploads copies those that a remote store lacks."""

    def __init__(self, local: LocalStore, remote: CheckpointStore):
        super().__init__(remote.storage)
        self._local = local
        self._remote = remote
        self.tiers = [local, remote]
        self._moving = threading.Lock()  # held while a step enters or leaves the remote store
        self._lock: RunLock | None = None  # of the remote store, once it is taken
        self._fence: Callable[[], None] = lambda: None
        self._uploaded: set[int] | None = None  # None: the remote store was not asked yet
        self._uploaded_pieces: set[str] = set()
        self._problem = ""
        self._wake = threading.Event()
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def locks(self, lease_s: float, name: str, remedy: str) -> list[RunLock]:
        """Return the locks of both tiers, not yet taken.

        The remote store may be out of service while checkpoints are committed in the directory. So a save checks what
        the last heartbeat has seen of its lock. Before anything is written or deleted there, the lock itself is
        checked.
        """
        self._lock = RunLock(self.root, lease_s, name, remedy, trusts_heartbeat=True)
        return [*self._local.locks(lease_s, name, remedy), self._lock]

    def steps(self) -> list[int]:
        return sorted({*self._local.steps(), *self.uploaded()})

    def path(self, step: int) -> str:
        """Return the path of the checkpoint of a step, in the nearest tier that has it."""
        return next(iter(self.locations(step)), self._local.path(step))

    def locations(self, step: int) -> list[str]:
        tiers = ((self._local, self._local.steps()), (self._remote, self.uploaded()))
        return [tier.path(step) for tier, steps in tiers if step in steps]

    def begin(self, step: int) -> Storage:
        return self._local.begin(step)

    def commit(self, staging: Storage, step: int, manifest: Fields, before_commit: Callable[[], None]) -> None:
        """Commit a staging area in the directory, and have it uploaded."""
        self._local.commit(staging, step, manifest, before_commit)
        self._known().discard(step)
        self._wake.set()

    def abort(self, staging: Storage) -> None:
        self._local.abort(staging)

    def delete(self, step: int) -> None:
        """Delete a checkpoint in both tiers. Raises OSError: the remote store is out of service. Nothing has
        changed."""
        with self._moving:
            orphans = [(tier, tier.tombstone(step)) for tier in self._writable_tiers(step)]
            self._known().discard(step)
        failpoint("save:deleting")
        for tier, name in orphans:
            tier.remove(name)

    def archive(self, step: int) -> str:
        with self._moving:
            names = [tier.archive(step) for tier in reversed(self._writable_tiers(step))]
            self._known().discard(step)
        return names[-1]

    def _writable_tiers(self, step: int) -> list[CheckpointStore]:
        """Return the tiers that have a step, the local one first, after a look at the lock of the remote one."""
        tiers: list[CheckpointStore] = [self._local] if step in self._local.steps() else []
        if step in self.uploaded():
            self._check()
            tiers.append(self._remote)
        return tiers

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
        self._local.write_latest(step)

    def probe(self) -> None:
        for tier in self.tiers:
            tier.probe()

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

    # ---------------------------------------------------------------------------------------------------
    # The queue of uploads

    def uploaded(self) -> set[int]:
        """Return the steps in the remote store."""
        return set(self._known())

    def _known(self) -> set[int]:
        if self._uploaded is None:
            self._uploaded = set(self._remote.steps())
        return self._uploaded

    def waiting(self) -> list[int]:
        """Return the steps that the remote store lacks, ascending."""
        uploaded = self.uploaded()
        return [step for step in self._local.steps() if step not in uploaded]

    def not_yet_uploaded(self) -> set[int]:
        """Return the steps that must stay until a newer one is uploaded. If uploads fail, the remote ones all stay."""
        uploaded = self.uploaded()
        newest = max(uploaded, default=-1)
        remote = uploaded if self._problem else ()
        return {newest, *remote, *(step for step in self._local.steps() if step > newest)}

    def start_uploads(self, fence: Callable[[], None]) -> None:
        """Begin to upload what waits, and what is committed from now on. `fence`: raises if this process has lost one
        of its locks, as far as their heartbeats have seen."""
        self._fence = fence
        self._wake.set()
        self._thread = threading.Thread(target=self._run, name="uploader", daemon=True)
        self._thread.start()

    def _check(self) -> None:
        """Check that this process may write to the remote store."""
        self._fence()
        if self._lock is not None:
            self._lock.check(now=True)

    def finish_uploads(self, timeout_s: float) -> None:
        """Wait until the newest checkpoint is uploaded, and end the uploads. `timeout_s`: the longest that it waits. An
        older checkpoint that is being uploaded may take the rest of it."""
        if self._thread is None:
            return
        deadline = time.monotonic() + timeout_s
        missing = [step for step in self.waiting() if step in self.not_yet_uploaded()]
        if missing:
            LOG.info("waiting up to %g s until global_step_%d is in %s", timeout_s, missing[-1], self.root)
            while missing[-1] not in self.uploaded() and time.monotonic() < deadline:
                time.sleep(0.1)
        self._ending.set()
        self._wake.set()
        left = [step for step in self.waiting() if step in self.not_yet_uploaded()]
        if left:
            LOG.warning(
                "global_step_%d is in %s alone, not in %s (%s); the same command on this machine uploads it",
                left[-1],
                self._local.root,
                self.root,
                self._problem or f"the upload took longer than {timeout_s:g} s",
            )
        else:
            self._thread.join(max(0.0, deadline - time.monotonic()))
        self._thread = None

    def _run(self) -> None:
        wait_s = time_limits.UPLOAD_FIRST_BACKOFF_S
        while True:
            newest = None
            try:
                newest = max(self.waiting(), default=None)  # the newest makes the most safe
                if newest is None or self._ending.is_set() and newest not in self.not_yet_uploaded():
                    if self._ending.is_set():
                        return
                    self._wake.wait()
                    self._wake.clear()
                    continue
                with TRACER.span(f"upload {newest}", "uploads"):
                    self._upload(newest)
                self._problem, wait_s = "", time_limits.UPLOAD_FIRST_BACKOFF_S
            except Exception as error:  # also of a disk that cannot be listed now
                with contextlib.suppress(OSError):
                    if newest is not None and newest not in self._local.steps():
                        continue  # it was archived meanwhile
                self._problem = str(error)
                what = "the newest checkpoint" if newest is None else f"global_step_{newest}"
                LOG.warning("%s is not uploaded yet: %s", what, error)
                if self._ending.wait(wait_s):
                    return
                wait_s = min(2 * wait_s, time_limits.UPLOAD_LONGEST_BACKOFF_S)

    def _upload(self, step: int) -> None:
        """Copy a checkpoint to the remote store, and commit it there. Raises CorruptCheckpointError: a local file does
        not have the content that was saved. Raises OSError: the store fails, or the checkpoint is gone."""
        checkpoint = manifests.read(self._local.path(step))
        self._check()
        new = [name for name in self._local.pieces() if name not in self._uploaded_pieces]
        for_each(lambda name: self._remote.keep_piece(name, self._local.piece(name)), new)
        self._uploaded_pieces.update(new)
        sources = {entry.path: posixpath.join(checkpoint.path, entry.path) for entry in checkpoint.entries}
        staging = self._remote.begin(step)
        try:
            for_each(lambda path: staging.upload(sources[path], path), sources, _PARALLEL)
            for entry in checkpoint.entries:
                if staging.written[entry.path] != entry:
                    raise CorruptCheckpointError(f"{sources[entry.path]}: does not have the content that was saved")
            failpoint("upload:copied")
            with self._moving:
                if step not in self._local.steps():
                    raise FileNotFoundError(errno.ENOENT, "it was archived", checkpoint.path)
                self._remote.commit(staging, step, checkpoint.manifest, self._check)
                self._known().add(step)
        except BaseException:
            with contextlib.suppress(OSError):
                self._remote.abort(staging)
            raise
        failpoint("upload:published")
        with contextlib.suppress(OSError):
            self._remote.write_latest(step)
            for name in self._remote.archived(step):
                self._remote.remove(name)
        LOG.info("uploaded %s to %s", checkpoint.path, self._remote.path(step))
