"""The directories that a run writes to: locked, and tried before anything expensive starts."""

from __future__ import annotations

import logging
import os

from trainer.checkpoint.lock import RunLock
from trainer.checkpoint.store import LocalStore
from trainer.errors import UserError
from trainer.run import record

LOG = logging.getLogger(__name__)


class Claim:
    """A run's directory and its checkpoint directory (which another run may name too), held by this process."""

    def __init__(self, run_dir: str, ckpt_path: str, timeout_s: float):
        self._ckpt_path = ckpt_path
        self.run_dir = RunLock(run_dir, timeout_s)
        self._locks = [self.run_dir]
        if os.path.realpath(ckpt_path) != os.path.realpath(run_dir):
            remedy = "choose another trainer.ckpt_path, or end that job"
            self._locks.append(RunLock(ckpt_path, timeout_s, "checkpoint directory", remedy))

    def acquire(self, wait: bool) -> None:
        """Lock both, and try in the checkpoint directory what a save does. Says so if an owner was dead.

        Raises:
            UserError: another job holds one of them; checkpoints cannot be written; those that this run has
                committed are not there.
        """
        taken_over = [self.run_dir.acquire(wait)]
        if not os.path.isdir(self._ckpt_path):  # it must not be made where its disk is not mounted
            record.check_nothing_committed(self.run_dir.directory, self._ckpt_path)
        try:
            taken_over += [lock.acquire(wait) for lock in self._locks[1:]]
            LocalStore(self._ckpt_path).probe()
        except OSError as error:
            raise UserError(
                f"trainer.ckpt_path={self._ckpt_path}: checkpoints cannot be written there "
                f"({_reason(self._ckpt_path, error)}); mount or repair it, or choose another"
            ) from error
        for note in taken_over:
            if note is not None:
                LOG.info("%s", note)

    def check(self) -> None:
        """Nothing, while both are ours.

        Raises:
            UserError: another job has taken one of them, or it is gone.
        """
        for lock in self._locks:
            lock.check()

    def release(self) -> None:
        """Give both back."""
        for lock in reversed(self._locks):
            lock.release()


def _reason(path: str, error: OSError) -> str:
    if os.path.islink(path) and not os.path.exists(path):
        return f"it is a link to {os.readlink(path)}, which is not there"
    return "it is not a directory" if os.path.exists(path) and not os.path.isdir(path) else error.strerror or str(error)
