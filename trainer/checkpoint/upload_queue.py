"""Uploads of checkpoints from the local store to the remote store, one after the other, on a thread.

What lies in the local and in the remote store is the truth, and a start derives the queue from it. While this process
holds the locks, it keeps one state for each step, so that the remote store is asked once.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import posixpath
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from trainer.checkpoint import manifest as manifests
from trainer.checkpoint.lock import RunLock
from trainer.checkpoint.manifest import CorruptCheckpointError
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
    since: float = field(default_factory=time.monotonic)
    """When it was committed on the disk, or found there."""


class UploadQueue:
    """The checkpoints of a local store that a remote store lacks."""

    def __init__(self, local: LocalStore, remote: CheckpointStore):
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

    def _state(self, step: int) -> StepState:
        return self._states.setdefault(step, StepState())

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

    def finish(self, timeout_s: float) -> None:
        """Wait until the newest checkpoint is uploaded, and end the uploads.

        Args:
            timeout_s: the longest that it waits. An older checkpoint that is being uploaded may take the rest of it.
        """
        if self._thread is None:
            return
        deadline = time.monotonic() + timeout_s
        missing = [step for step in self.waiting() if step in self.not_yet_uploaded()]
        if missing:
            LOG.info("waiting up to %g s until global_step_%d is in %s", timeout_s, missing[-1], self._remote.root)
            while missing[-1] not in self.uploaded() and time.monotonic() < deadline:
                time.sleep(0.1)
        self._ending.set()
        self._wake.set()
        left = [step for step in self.waiting() if step in self.not_yet_uploaded()]
        if left:
            reason = f"the upload took longer than trainer.ckpt_upload_timeout_s={timeout_s:g}"
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
        newest = max(self.waiting(), default=None)
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
        sources = {entry.path: posixpath.join(checkpoint.path, entry.path) for entry in checkpoint.entries}
        staging = self._remote.begin(step)
        try:
            for_each(lambda path: staging.upload(sources[path], path), sources, _PARALLEL)
            for entry in checkpoint.entries:
                if staging.written[entry.path] != entry:
                    raise CorruptCheckpointError(f"{sources[entry.path]}: does not have the content that was saved")
            failpoint("upload:copied")
            with self.moving:
                if step not in self._local.steps():
                    raise FileNotFoundError(errno.ENOENT, "it was archived", checkpoint.path)
                manifests.copy_rollback_mark(checkpoint, staging)
                self._remote.commit(staging, step, checkpoint.manifest, self.check)
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
