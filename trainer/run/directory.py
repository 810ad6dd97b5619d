"""A run's directory: held by one process, with what earlier processes of the run have left in it."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import Any

from trainer.checkpoint.manager import CheckpointManager
from trainer.checkpoint.retention import Retention
from trainer.checkpoint.store import LocalStore
from trainer.config import Config
from trainer.errors import UserError
from trainer.metrics.tracker import CUT_FILE, METRICS_FILE, check_lines, first_step
from trainer.run import lineage, record
from trainer.run.claim import Claim
from trainer.run.resume import Resume, compare, find_newest, find_resume
from trainer.signals import Stopped

LOG = logging.getLogger(__name__)
_SETTLE_S = 60.0


class RunDirectory:
    """A run's directory and its checkpoints, held by this process from `open` to `close`.

    Args:
        cfg: `trainer.run_dir` and `ckpt_path` say where it is.
        supervised: of a supervised run, to which much of the config means nothing.
    """

    def __init__(self, cfg: Config, supervised: bool = False):
        self.cfg = cfg
        self.supervised = supervised
        t = cfg.trainer
        self.claim = Claim(t.run_dir, t.ckpt_path, t.lock_timeout_s)
        self.metrics_file = os.path.join(t.run_dir, METRICS_FILE)
        self.checkpoints = CheckpointManager(
            LocalStore(t.ckpt_path),
            Retention(t.max_ckpts_to_keep, t.keep_every, t.keep_best, t.best_mode, t.best_metric),
            t.verify_checkpoint,
            fence=self.claim.check,
            committed=lambda step: record.write(t.run_dir, step, t.ckpt_path),
        )
        self.resume: Resume | None = None
        self.lineage: dict[str, Any] = {}
        """Of a fork: the checkpoint that it started from (see `trainer.run.lineage`)."""

    def open(self, wait: bool = False) -> RunDirectory:
        """Take the locks, clear away what a killed run left, and find the checkpoint to continue from.

        Args:
            wait: when another job runs here, wait for its end.

        Raises:
            UserError: another job runs here; the directory holds a run and nothing was said about resuming;
                checkpoints cannot be written, or those of this run are gone; the checkpoint cannot be used, or not
                under this config; `metrics.jsonl` is not what the run has logged.
        """
        try:
            self.claim.acquire(wait)
            self.checkpoints.clean_up()
            self.resume = find_resume(self.cfg, self.checkpoints, self.supervised)
            self.lineage = lineage.read(self.cfg.trainer.run_dir)
            if self.resume is not None and not self.resume.restore.fork:
                self._complete_record(self.resume)
            self._check_metrics()
        except BaseException:
            self.close()
            raise
        return self

    def _complete_record(self, resume: Resume) -> None:
        """Record the commit that was found, where a kill came between the two, or an older version kept no record."""
        t = self.cfg.trainer
        if not record.exists(t.run_dir):
            record.write(t.run_dir, resume.checkpoint.step, t.ckpt_path)

    def _check_metrics(self) -> None:
        """Check that `metrics.jsonl` has what the run had logged when it saved the checkpoint."""
        if self.resume is None:
            if (first := first_step(self.metrics_file)) is not None:
                LOG.info(
                    "an earlier start logged steps from %d on and committed no checkpoint: training starts again, and "
                    "these lines are kept in %s", first, CUT_FILE,
                )  # fmt: skip
        elif not self.resume.restore.fork:
            checkpoint = self.resume.checkpoint
            check_lines(self.metrics_file, checkpoint.manifest.get("metrics_from"), checkpoint.step)

    def fall_back(self) -> Resume:
        """Take the checkpoint before the one that was resumed from in its place; returns it.

        Raises:
            UserError: there is none, or it cannot be used under this config.
        """
        assert self.resume is not None
        self.checkpoints.wait()  # a save of the steps that are given up must not appear after they were put aside
        before = find_newest(self.cfg, self.checkpoints, before=self.resume.checkpoint.step)
        if before is None:
            raise UserError(
                f"trainer.on_resume_mismatch=fallback: there is no checkpoint before {self.resume.checkpoint.path}"
            )
        self.resume = compare(self.cfg, before, False, self.supervised)  # it may be older than a permitted change
        LOG.info("going back to %s, step %d", before.path, before.step)
        return self.resume

    def check(self) -> None:
        """Check that this process still holds the directory.

        Raises:
            UserError: another job has taken it.
        """
        self.claim.run_dir.check()

    @contextlib.contextmanager
    def settling(self) -> Iterator[None]:
        """If the block fails, let a save that is under way end while the ranks still live: its state is good."""
        try:
            yield
        except (Exception, Stopped):
            self.checkpoints.wait(_SETTLE_S)
            raise

    def close(self) -> None:
        """Give the locks back."""
        self.claim.release()

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
