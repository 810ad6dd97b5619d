"""The directory of a run: locked by one process, with the files that earlier processes of the run have written."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

from trainer.checkpoint import last_commit
from trainer.checkpoint import manifest as manifests
from trainer.checkpoint.components import Restore, read_revisions
from trainer.checkpoint.lock import RunLock
from trainer.checkpoint.manager import CheckpointManager, Retention
from trainer.checkpoint.manifest import Checkpoint, CorruptCheckpointError, UnreadableError
from trainer.checkpoint.sharded import checked_shards
from trainer.checkpoint.store import Ranks, check_access, give_access
from trainer.checkpoint.uploads import open_tiers
from trainer.config import Config
from trainer.errors import UserError
from trainer.files.appended import cut_torn_line
from trainer.files.hf_hub import is_data, pin
from trainer.files.uris import is_same, is_url
from trainer.metrics.trace_file import Timeline
from trainer.metrics.tracker import METRICS_FILE, MetricsLines, check_lines
from trainer.process import time_limits
from trainer.process.failures import INCIDENTS
from trainer.process.log_setup import LOG_FILE
from trainer.process.startup import stage
from trainer.run.resume import Resume, compare, damaged_origin, find_newest, find_resume, read_lineage
from trainer.run.run_files import PATTERNS, RunFiles
from trainer.run.run_metadata import LOG_NAME, has_metrics

LOG = logging.getLogger(__name__)


class RunDirectory(contextlib.AbstractContextManager["RunDirectory"]):
    """A run's directory and its checkpoints, held by this process from `open` to `close`."""

    def __init__(self, cfg: Config):
        self.cfg = cfg
        t = cfg.trainer
        metric, mode = cfg.compared_by
        store = open_tiers(t.ckpt_path, t.ckpt_cache_dir)
        self._lock = RunLock(t.run_dir, time_limits.LOCK_LEASE_S)
        self._locks = [self._lock]
        if not is_same(t.ckpt_path, t.run_dir):  # several runs could name one directory for their checkpoints
            remedy = "choose another trainer.ckpt_path, or end that job"
            self._locks += store.locks(time_limits.LOCK_LEASE_S, "checkpoint directory", remedy)
        self.metrics_file = os.path.join(t.run_dir, METRICS_FILE)
        self.checkpoints = CheckpointManager(
            store,
            Retention(newest=t.max_ckpts_to_keep, best=t.keep_best, best_mode=mode, best_metric=metric),
            fence=self.check_locks,
            committed=self._record_commit,
            disk_is_full=self._free_space,
        )
        self._timeline = Timeline(t.run_dir, cfg.logger, self.check)
        self._revisions: dict[str, str] | None = None  # those that were pinned before
        self._checked = False  # that ranks can write checkpoints
        self.on_commit: Callable[[], None] = lambda: None  # called after each commit, on another thread
        self.on_full_disk: Callable[[], None] = lambda: None
        """Called after a save that found the disk of the run directory full, on another thread."""
        self.run_files = RunFiles(t.run_dir, store)
        """The files of the run directory that checkpoints carry, if the store asks for it."""
        self.resume: Resume | None = None
        self._began_with: Resume | None = None
        self.lineage: dict[str, Any] = {}
        """For a fork: the checkpoint that it started from (see `read_lineage`). Empty for other runs."""

    @property
    def continued(self) -> Checkpoint | None:
        """The checkpoint of this run from which it continues. None: it starts from the beginning, or is a new fork."""
        return None if self.resume is None or self.resume.restore.fork else self.resume.checkpoint

    def metrics(self) -> MetricsLines:
        """Return the lines of `metrics.jsonl`."""
        return MetricsLines(self.metrics_file)

    def _record_commit(self, step: int) -> None:
        last_commit.write(self.cfg.trainer.run_dir, step, self.cfg.trainer.ckpt_path)
        self._timeline.flush()
        self.on_commit()

    def _free_space(self, error: OSError) -> None:
        t = self.cfg.trainer
        path, own = t.ckpt_cache_dir or t.ckpt_path, os.path.join(os.path.abspath(t.run_dir), "")
        is_own_file = os.path.abspath(str(error.filename or "/")).startswith(own)
        if is_own_file or not is_url(path) and os.stat(path).st_dev == os.stat(t.run_dir).st_dev:
            self.on_full_disk()

    def oldest_start(self) -> int:
        """Return the oldest step that a resume may begin behind: the last commit, or the one before if it is damaged.

        A machine that is lost leaves what was uploaded. 0: there is no commit.
        """
        store = self.checkpoints.store
        return max(0, min([*store.steps()[-2:], *store.not_yet_uploaded()], default=0))

    def open(self, wait: bool = False) -> RunDirectory:
        """Take the locks, remove what a killed run has left, and find the checkpoint to resume from.

        Args:
            wait: it is a warm start: if another job runs here, wait for its end. A missing checkpoint is not logged.

        Raises:
            UserError: another job runs here; the directory holds a run but `trainer.resume_mode` is not set;
                checkpoints cannot be written; the checkpoints of this run are missing; the checkpoint cannot be used,
                or not under this config; or `metrics.jsonl` lacks lines that the run has logged.
        """
        try:
            with stage("looking for a checkpoint to resume from"):
                taken_over = self._acquire_locks(wait)
                # A kill has left torn last lines, also in files to which nothing will be appended.
                for name in (*(name for name in PATTERNS if name.endswith(".jsonl") and "/" not in name), LOG_NAME):
                    with contextlib.suppress(OSError):  # the code that needs the file reports it
                        cut_torn_line(os.path.join(self.cfg.trainer.run_dir, name))
                if not wait:  # what a warm start says belongs to the run that waits for it
                    LOG_FILE.open(os.path.join(self.cfg.trainer.run_dir, LOG_NAME))
                self.checkpoints.clean_up()
                self._restore_run_files()
                if self.checkpoints.store.keeps_record:
                    self.run_files.remove_unused()
                self.checkpoints.store.start_uploads(self.check_locks)
                INCIDENTS.open(self.cfg.trainer.run_dir, self.check)
                self._timeline.open()
                self.resume = self._began_with = find_resume(self.cfg, self.checkpoints)
                self._revisions = pin(self._revisions_of_parent())
                if self.resume is None and self.cfg.trainer.resume_mode == "latest" and not wait:
                    path = self.cfg.trainer.run_dir
                    LOG.info("%s holds no checkpoint to continue: training starts from the beginning", path)
                self.lineage = read_lineage(self.cfg.trainer.run_dir)
                self._complete_record()
                if taken_over:  # the driver of the last start died
                    steps = self.metrics().steps
                    step = steps[-1] + 1 if steps else 0
                    action, cost_s = "started again with the same command", self.lost_seconds()
                    INCIDENTS.note("driver", "driver", "killed process", action, taken_over, step=step, cost_s=cost_s)
        except BaseException:
            self.close()
            raise
        return self

    def _acquire_locks(self, wait: bool) -> str:
        """Lock both directories, and test that a save can write to the checkpoint directory.

        Log a line for each lock that was taken over from a dead process. Return that of the run directory; empty: none.
        """
        t, store = self.cfg.trainer, self.checkpoints.store
        taken_over = [self._lock.acquire(wait)]
        if not store.storage.exists():  # do not create the directory if its disk is not mounted
            last_commit.check_nothing_committed(t.run_dir, t.ckpt_path)
        try:
            taken_over += [lock.acquire(wait) for lock in self._locks[1:]]
            store.probe()
        except OSError as error:
            raise UserError(
                f"trainer.ckpt_path={t.ckpt_path}: checkpoints cannot be written there "
                f"({_reason(t.ckpt_path, error)}); mount or repair it, or choose another"
            ) from error
        for line in filter(None, taken_over):
            LOG.info("%s", line)
        return taken_over[0] or ""

    def _revisions_of_parent(self) -> dict[str, str]:
        """Return the commits of the Hub to use: those that the run, or the parent of a fork, began with."""
        if self.resume is None:
            return {}
        kinds, revisions = self.resume.restore.kinds, read_revisions(self.resume.checkpoint)
        return {name: one for name, one in revisions.items() if ("data" if is_data(name) else "weights") in kinds}

    def rediscover(self, copy: Checkpoint | None = None) -> None:
        """Find the newest checkpoint of this run, after the ranks have died. Without one, it is that of the start. A
        `copy` is in shared memory. Raises UserError: the checkpoints of this run are missing, or none is valid."""
        self.checkpoints.clean_up()
        began = self._began_with
        if copy is not None and copy.step >= max(self.checkpoints.store.steps(), default=0):
            rounding, altered = (began.same_rounding, began.altered) if began is not None else (True, False)
            self.resume = Resume(copy, Restore(), rounding, altered, is_copy=True)
            return
        newest = find_newest(self.cfg, self.checkpoints)
        self.resume = began if newest is None else compare(self.cfg, newest, False)

    @contextlib.contextmanager
    def checked_resume(self, ranks: Ranks) -> Iterator[Resume | None]:
        """Give the checkpoint to resume from to the block, which loads it, after the ranks have checked its shards.

        If one is damaged, an older checkpoint takes its place. Raises UserError: there is none, or the user has named
        the damaged one; or a shard cannot be read."""
        with contextlib.ExitStack() as shards:
            while (resume := self.resume) is not None and not resume.is_copy:
                try:
                    shards.enter_context(checked_shards(resume.checkpoint, ranks))
                    break
                except CorruptCheckpointError as error:
                    if resume.restore.fork:
                        raise damaged_origin(error) from error
                    self.checkpoints.damaged[resume.checkpoint.path] = error
                    self.rediscover()
            yield resume

    def check_access(self, ranks: Ranks) -> None:
        """Give ranks on other machines the driver's access to the stores, and check that they can write checkpoints.
        Raises UserError: a machine with ranks cannot."""
        t = self.cfg.trainer
        give_access([t.ckpt_path, t.resume_path, t.export_path], ranks)
        if t.ckpt_cache_dir is not None:
            check_access("trainer.ckpt_cache_dir", t.ckpt_cache_dir, ranks)
        if not self._checked:  # later, the store may be out of service while there is a local one
            check_access("trainer.ckpt_path", t.ckpt_path, ranks)
            self._checked = True

    def lost_seconds(self) -> float:
        """Return the seconds of the logged steps that `resume` trains again."""
        step = -1 if self.continued is None else self.continued.step
        return sum(row.get("time/step") or 0.0 for row in self.metrics().after(step))

    def _restore_run_files(self) -> None:
        """Restore the files of the run directory that the newest checkpoint carries, if the disk has lost them."""
        if self.cfg.trainer.resume_mode in (None, "none") or not self.checkpoints.store.keeps_record:
            return
        for step in reversed(self.checkpoints.store.steps()):
            try:
                self.run_files.restore(manifests.read(self.checkpoints.store.path(step)))
                return
            except UnreadableError as error:
                raise UserError(
                    f"trainer.resume_mode={self.cfg.trainer.resume_mode}: {error}; make it readable"
                ) from error
            except CorruptCheckpointError as error:
                LOG.warning("the files of the run directory are not restored from a damaged checkpoint: %s", error)

    def _complete_record(self) -> None:
        """Record the commit of the resumed checkpoint if a kill came between the two, and check that `metrics.jsonl`
        has the lines that the run had logged when it saved the checkpoint."""
        t, continued = self.cfg.trainer, self.continued
        if self.resume is None and has_metrics(t.run_dir):
            LOG.info("an earlier start logged steps and committed no checkpoint: training starts again")
        if continued is not None:
            if not last_commit.exists(t.run_dir):
                last_commit.write(t.run_dir, continued.step, t.ckpt_path)
            check_lines(self.metrics_file, continued.manifest.get("metrics_from"), continued.step)

    def check(self) -> None:
        """Check that this process still holds the directory. Raises UserError: another job has taken it."""
        self._lock.check()

    def check_locks(self) -> None:
        """Check that this process still holds the directory, and that of its checkpoints. Raises UserError: another job
        has taken one of them, or one is gone."""
        for lock in self._locks:
            lock.check()

    def close(self) -> None:
        """Wait for uploads, and release the locks."""
        self.checkpoints.store.finish_uploads(time_limits.UPLOAD_END_S)
        self._timeline.close()
        INCIDENTS.close()
        if self._revisions is not None:
            pin(self._revisions)
        for lock in reversed(self._locks):
            lock.release()

    def __exit__(self, *_: object) -> None:
        self.close()


def _reason(path: str, error: OSError) -> str:
    if is_url(path):
        return error.strerror or str(error)
    if os.path.islink(path) and not os.path.exists(path):
        return f"it is a link to {os.readlink(path)}, which is not there"
    return "it is not a directory" if os.path.exists(path) and not os.path.isdir(path) else error.strerror or str(error)
