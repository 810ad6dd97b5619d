"""Lock and test the directories that a run writes to, before anything expensive starts."""

from __future__ import annotations

import logging
import os

from trainer.checkpoint import last_commit
from trainer.checkpoint.lock import RunLock
from trainer.checkpoint.store import CheckpointStore
from trainer.errors import UserError
from trainer.files.uris import is_same, is_url

LOG = logging.getLogger(__name__)


class DirectoryLocks:
    """The locks of this process on a run's directory and its checkpoint directory, which several runs could name."""

    def __init__(self, run_dir: str, ckpt_path: str, store: CheckpointStore, timeout_s: float):
        self._ckpt_path = ckpt_path
        self.taken_over = ""
        """A line about the dead process that held the run directory before; empty if there was none."""
        self._store = store
        self.run_dir = RunLock(run_dir, timeout_s)
        self._locks = [self.run_dir]
        if not is_same(ckpt_path, run_dir):
            remedy = "choose another trainer.ckpt_path, or end that job"
            self._locks += store.locks(timeout_s, "checkpoint directory", remedy)

    def acquire(self, wait: bool) -> None:
        """Lock both directories, and test that a save can write to the checkpoint directory.

        Log a line for each lock that was taken over from a dead process.

        Args:
            wait: if another job runs in the run directory, wait for its end.

        Raises:
            UserError: another job holds one of the directories; checkpoints cannot be written; or the checkpoints that
                this run has committed are missing.
        """
        taken_over = [self.run_dir.acquire(wait)]
        if not self._store.storage.exists():  # do not create the directory if its disk is not mounted
            last_commit.check_nothing_committed(self.run_dir.directory, self._ckpt_path)
        try:
            for lock in self._locks[1:]:
                taken_over.append(lock.acquire(wait))
            self._store.probe()
        except OSError as error:
            raise UserError(
                f"trainer.ckpt_path={self._ckpt_path}: checkpoints cannot be written there "
                f"({_reason(self._ckpt_path, error)}); mount or repair it, or choose another"
            ) from error
        for line in taken_over:
            if line is not None:
                LOG.info("%s", line)
        self.taken_over = taken_over[0] or ""

    def check(self) -> None:
        """Check that this process still holds both locks.

        Raises:
            UserError: another job has taken a lock, or a directory is gone.
        """
        for lock in self._locks:
            lock.check()

    def release(self) -> None:
        """Release both locks."""
        for lock in reversed(self._locks):
            lock.release()


def _reason(path: str, error: OSError) -> str:
    if is_url(path):
        return error.strerror or str(error)
    if os.path.islink(path) and not os.path.exists(path):
        return f"it is a link to {os.readlink(path)}, which is not there"
    return "it is not a directory" if os.path.exists(path) and not os.path.isdir(path) else error.strerror or str(error)
