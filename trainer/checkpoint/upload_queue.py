"""Uploads of checkpoints from the local disks to the remote store, one after the other, on a thread.

What lies on the disks and in the remote store is the truth, and a start derives the queue from it. While this process
holds the locks, it keeps one state for each step, so that the remote store is asked once.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from trainer.checkpoint import late_validation
from trainer.checkpoint import manifest as manifests
from trainer.checkpoint.lock import RunLock
from trainer.checkpoint.manifest import CheckpointError, CorruptCheckpointError
from trainer.checkpoint.replica_ranks import NodeDisks
from trainer.checkpoint.storage import for_each
from trainer.checkpoint.store import CheckpointStore, LocalStore
from trainer.process import time_limits
from trainer.process.failpoints import failpoint
from trainer.process.tracing import TRACER

LOG = logging.getLogger(__name__)

_PARALLEL = 8


@dataclass
class StepState:
    """What this process knows of a step. Whether it is on the local disk is asked of the disk."""

    is_uploaded: bool = False
    is_lost: bool = False
    """The local disks lack files of it."""
    since: float = field(default_factory=time.monotonic)
    """When it was committed on the disk, or found there."""


class UploadQueue:
    """The checkpoints of a local store that a remote store lacks."""

    def __init__(self, local: LocalStore, remote: CheckpointStore):
        self.nodes: NodeDisks | None = None
        """The disks of other nodes, while ranks are there."""
        self.moving = threading.Lock()
        """Held while a step enters or leaves the remote store."""
        self.lock: RunLock | None = None
        """The lock of the remote store, once it is taken."""
        self.fence: Callable[[], None] = lambda: None
        """Raises if this process has lost one of its locks, as far as their heartbeats have seen."""
        self._local = local
        self._remote = remote
        self._states: dict[int, StepState] = {}
        self._is_derived = False
        self._uploaded_pieces: set[str] = set()
        self._problem = ""
        self._wake = threading.Event()
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    # ---------------------------------------------------------------------------------------------------
    # The states

    def uploaded(self) -> set[int]:
        """Return the steps in the remote store."""
        if not self._is_derived:
            for step in self._remote.steps():
                self._states.setdefault(step, StepState()).is_uploaded = True
            self._is_derived = True
        return {step for step, state in list(self._states.items()) if state.is_uploaded}

    def readable(self, step: int) -> bool:
        """Return whether the local disks have a step, as far as is known."""
        return step in self._local.steps() and not self._state(step).is_lost

    def waiting(self) -> list[int]:
        """Return the steps that the remote store lacks, ascending."""
        uploaded = self.uploaded()
        return [step for step in self._local.steps() if step not in uploaded and not self._state(step).is_lost]

    def not_yet_uploaded(self) -> set[int]:
        """Return the steps that must stay until a newer one is uploaded. If uploads fail, the remote ones all stay."""
        uploaded = self.uploaded()
        newest = max(uploaded, default=-1)
        remote = uploaded if self._problem else ()
        return {newest, *remote, *(step for step in self._local.steps() if step > newest)}

    def lag_s(self) -> float:
        """Return how long the oldest checkpoint that is not yet uploaded has waited, in seconds; 0 if none waits.

        Checkpoints that are older than an uploaded one do not count.
        """
        newest = max(self.uploaded(), default=-1)
        since = [self._state(step).since for step in self.waiting() if step > newest]
        return time.monotonic() - min(since) if since else 0.0

    def add(self, step: int) -> None:
        """Upload a step that has been committed on the disk."""
        self._states[step] = StepState()
        self._wake.set()

    def remove(self, step: int) -> None:
        """Forget a step that has left both stores."""
        self._states.pop(step, None)

    def lose(self, step: int) -> None:
        """Note that the local disks lack files of a step."""
        self._state(step).is_lost = True

    def needs_ranks(self) -> bool:
        """Return whether files that must be uploaded are on the disks of other nodes, which only ranks reach."""
        needed = self.not_yet_uploaded()
        return any(step in needed and self._is_apart(step) for step in self.waiting())

    def _state(self, step: int) -> StepState:
        return self._states.setdefault(step, StepState())

    def _ready(self) -> list[int]:
        """Return the steps that can be uploaded now."""
        return [step for step in self.waiting() if self.nodes is not None or not self._is_apart(step)]

    def _is_apart(self, step: int) -> bool:
        """Return whether shards of a checkpoint are on the disks of other nodes alone."""
        try:
            checkpoint = manifests.read(self._local.path(step))
        except CheckpointError:
            return False
        shards = (path for paths in checkpoint.nodes.values() for path in paths)
        return any(not os.path.exists(os.path.join(checkpoint.path, path)) for path in shards)

    # ---------------------------------------------------------------------------------------------------
    # The thread

    def start(self, fence: Callable[[], None]) -> None:
        """Begin to upload what waits, and what is committed from now on.

        Args:
            fence: raises if this process may no longer write to the stores.
        """
        self.fence = fence
        self.waiting()  # the time of those that wait counts from now on
        self._wake.set()
        self._thread = threading.Thread(target=self._run, name="uploader", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Check that this process may write to the remote store."""
        self.fence()
        if self.lock is not None:
            self.lock.check(now=True)

    def wake(self) -> None:
        """Look again for steps that can be uploaded."""
        self._wake.set()

    def finish(self, timeout_s: float) -> None:
        """Wait until the newest checkpoint is uploaded, and end the uploads.

        Args:
            timeout_s: the longest that it waits. An older checkpoint that is being uploaded may take the rest of it.
        """
        if self._thread is None:
            return
        deadline = time.monotonic() + timeout_s
        missing = [step for step in self._ready() if step in self.not_yet_uploaded()]
        if missing:
            LOG.info("waiting up to %g s until global_step_%d is in %s", timeout_s, missing[-1], self._remote.root)
            while missing[-1] not in self.uploaded() and time.monotonic() < deadline:
                time.sleep(0.1)
        self._ending.set()
        self._wake.set()
        left = [step for step in self.waiting() if step in self.not_yet_uploaded()]
        if left:
            reason = f"the upload took longer than trainer.ckpt_upload_timeout_s={timeout_s:g}"
            if left[-1] not in self._ready():
                reason = "parts of it are on nodes whose ranks have ended"
            LOG.warning(
                "global_step_%d is in %s alone, not in %s (%s); the same command on this machine uploads it",
                left[-1],
                self._local.root,
                self._remote.root,
                self._problem or reason,
            )
        else:
            self._thread.join(max(0.0, deadline - time.monotonic()))
        self._thread = None

    def _run(self) -> None:
        wait_s = time_limits.UPLOAD_FIRST_BACKOFF_S
        while True:
            self._wake.wait()
            self._wake.clear()
            while True:
                newest = None
                try:
                    if (newest := self._next()) is None:
                        break
                    with TRACER.span(f"upload {newest}", "uploads"):
                        self._upload(newest)
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
                else:
                    self._problem, wait_s = "", time_limits.UPLOAD_FIRST_BACKOFF_S
            if self._ending.is_set():
                return

    def _next(self) -> int | None:
        """Return the step to upload next, the newest first, which makes the most safe; None: there is none."""
        newest = max(self._ready(), default=None)
        return None if self._ending.is_set() and newest not in self.not_yet_uploaded() else newest

    def _upload(self, step: int) -> None:
        """Copy a checkpoint of the disks to the remote store, and commit it there.

        Raises:
            CorruptCheckpointError: a file on a disk does not have the content that was saved.
            OSError: the store fails, or the checkpoint is gone.
        """
        checkpoint = manifests.read(self._local.path(step))
        self.check()
        self.upload_pieces()
        staging, nodes = self._remote.begin(step), self.nodes
        paths = [entry.path for entry in checkpoint.entries]
        here = [path for path in paths if os.path.exists(os.path.join(checkpoint.path, path))]
        away = [path for path in paths if path not in here]
        try:
            with ThreadPoolExecutor(_PARALLEL) as pool:
                copying = pool.map(lambda path: staging.upload(os.path.join(checkpoint.path, path), path), here)
                if away and nodes is not None:
                    staging.written.update(nodes.upload(checkpoint, staging.path, away))
                for _ in copying:
                    pass
            for entry in checkpoint.entries:
                if staging.written.get(entry.path) != entry:
                    source = os.path.join(checkpoint.path, entry.path)
                    raise CorruptCheckpointError(f"{source}: does not have the content that was saved")
            failpoint("upload:copied")
            manifest = {name: value for name, value in checkpoint.manifest.items() if name != "nodes"}
            with self.moving:
                if step not in self._local.steps():
                    raise FileNotFoundError(errno.ENOENT, "it was archived", checkpoint.path)
                manifests.copy_rollback_mark(checkpoint, staging)
                late_validation.copy(checkpoint, staging)
                self.upload_pieces()  # those of a validation that has just been added
                self._remote.commit(staging, step, manifest, self.check)
                self._state(step).is_uploaded = True
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

    def upload_pieces(self) -> None:
        """Copy the pieces of the files of the run directory that the remote store lacks."""
        new = [name for name in self._local.pieces() if name not in self._uploaded_pieces]
        for_each(lambda name: self._remote.keep_piece(name, self._local.piece(name)), new)
        self._uploaded_pieces.update(new)
