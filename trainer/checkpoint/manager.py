"""Save, find and load the checkpoints of a run.

A save writes its files to a staging area, which no reader sees. It makes every file durable, hashes it, and commits the
staging area with a manifest: a directory is a checkpoint if and only if its manifest agrees with its files. Then the
save writes the latest pointer and deletes old checkpoints. After the state is copied, the save runs on another thread
while training continues. At most one save is under way.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from trainer import __version__
from trainer.checkpoint import manifest as manifests
from trainer.checkpoint.components import Component, Restore
from trainer.checkpoint.manifest import (
    Checkpoint,
    CheckpointError,
    CorruptCheckpointError,
    FileEntry,
    UnreadableError,
)
from trainer.checkpoint.storage import Storage, StoreError
from trainer.checkpoint.store import CheckpointStore
from trainer.errors import UserError, as_list, is_disk_unwritable, text_of
from trainer.process import time_limits
from trainer.process.failpoints import failpoint
from trainer.process.signals import SIGNALS, Stopped
from trainer.process.tracing import TRACER

LOG = logging.getLogger(__name__)

SAVES = "saves"  # the row of saves in the timeline


@dataclass(frozen=True)
class SaveResult:
    """The result of a save."""

    step: int
    path: str
    seconds: float  # seconds from begin to commit or failure
    bytes: int = 0
    error: str | None = None


@dataclass(frozen=True)
class Retention:
    """The checkpoints to keep besides the newest: see `trainer.max_ckpts_to_keep` and `keep_best`."""

    newest: int = -1
    best: int = 0
    best_mode: str = "max"
    best_metric: str = ""

    def disposable(self, scores: Mapping[int, float | None], protected: Collection[int] = ()) -> list[int]:
        """Return the steps that no rule keeps, oldest first.

        Args:
            scores: the metric of `keep_best` for each committed step; None: it was not measured at the step.
            protected: steps to keep regardless of the rules. The newest step is always kept.
        """
        if self.newest < 0:
            return []
        steps = sorted(scores)
        keep = set(protected) | set(steps[-max(1, self.newest) :])
        if self.best > 0:
            sign = 1 if self.best_mode == "max" else -1
            measured = [step for step in steps if scores[step] is not None]
            # Of two equal scores keep the earlier step, which had less time to overfit.
            keep |= set(sorted(measured, key=lambda step: (-sign * scores[step], step))[: self.best])  # type: ignore
        return [step for step in steps if step not in keep]


class CheckpointManager:
    """The checkpoints of one run.

    Args:
        fence: called before a save and before its commit. It raises `UserError` if this process may no longer write to
            the store.
        committed: called with the step after each commit.
        disk_is_full: called with the error of a save that has failed because a disk is full or read-only.
        log_level: of the lines about saves that end.
    """

    def __init__(
        self,
        store: CheckpointStore,
        retention: Retention | None = None,
        fence: Callable[[], None] = lambda: None,
        committed: Callable[[int], None] = lambda step: None,
        disk_is_full: Callable[[OSError], None] = lambda error: None,
        log_level: int = logging.INFO,
    ):
        self.store = store
        self.retention = retention or Retention()
        self.resumed_from: int | None = None  # the step that the run resumed from, if it is in this store
        self.damaged: dict[str, CorruptCheckpointError] = {}
        """Checkpoints that turned out to be damaged when they were loaded, by path."""
        self._fence = fence
        self._committed = committed
        self._disk_is_full = disk_is_full
        self._log_level = log_level
        self._saving: threading.Thread | None = None
        self._results: queue.SimpleQueue[SaveResult] = queue.SimpleQueue()  # of the threads of saves
        self._failed: list[Storage] = []
        """Staging areas of failed saves, into which ranks may still have written while they were deleted."""

    # ---------------------------------------------------------------------------------------------------
    # Saving

    def save(
        self,
        step: int,
        components: Sequence[Component],
        description: dict[str, Any],
        before: Sequence[Callable[[], None]] = (),
    ) -> None:
        """Begin to save `global_step_{step}`: take the state of all components now, write and commit it on a thread.

        A save that is still under way ends first. `results` returns the result.

        Args:
            description: further fields of the manifest (ranks, mesh, versions, config digest, score).
            before: called first. The save fails if one of them raises `OSError`.
        """
        self.wait()
        for left in self._failed:
            with contextlib.suppress(OSError):  # most are gone
                self.store.abort(left)
        self._failed = []
        names = [component.name for component in components]
        assert len(set(names)) == len(names), f"saved twice: {names}"
        started = time.monotonic()
        failpoint("save:begin")
        staging: Storage | None = None
        finishers: list[Callable[[], list[FileEntry]]] = []
        failure: Exception | None = None
        try:
            self._fence()
            for prepare in before:
                prepare()
            staging = self.store.begin(step)
            for component in components:
                finishers.append(component.begin(staging))
        except (OSError, UserError) as error:
            failure = error

        def run() -> None:
            try:
                with TRACER.span("write", SAVES):
                    files = _finish(finishers, failure)
                assert staging is not None
                with TRACER.span("commit", SAVES):
                    total = self._commit(step, names, staging, files, description)
                result = SaveResult(step, self.store.path(step), time.monotonic() - started, total)
                LOG.log(
                    self._log_level, "saved %s (%.1f MB in %.1f s)", result.path, result.bytes / 1e6, result.seconds
                )
            except BaseException as error:  # the caller of `results` decides about failures of any kind
                result = SaveResult(step, "", time.monotonic() - started, error=text_of(error))
                if staging is not None:
                    self._failed.append(staging)
                    with contextlib.suppress(OSError):
                        self.store.abort(staging)
                if isinstance(error, OSError) and is_disk_unwritable(error):
                    with _warned():
                        self._disk_is_full(error)
            TRACER.add(f"save {step}", started, time.monotonic(), SAVES, bytes=result.bytes)
            self._results.put(result)

        self._saving = threading.Thread(target=run, name=f"the save of step {step}", daemon=True)
        self._saving.start()

    def results(self) -> list[SaveResult]:
        """Return the results of the saves that have ended since the last call."""
        return [self._results.get() for _ in range(self._results.qsize())]

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until no save is under way, or for `timeout_s`."""
        if self._saving is not None:
            with SIGNALS.waiting():
                self._saving.join(timeout_s)
            if not self._saving.is_alive():
                self._saving = None

    @contextlib.contextmanager
    def ended(self) -> Iterator[None]:
        """If the block fails or stops, wait a while for the save under way. What it needs must still live."""
        try:
            yield
        except (Exception, Stopped):
            self.wait(time_limits.SAVE_END_S)
            raise

    @property
    def saving(self) -> bool:
        """Whether a save is under way."""
        return self._saving is not None and self._saving.is_alive()

    def _commit(
        self,
        step: int,
        names: list[str],
        staging: Storage,
        files: Sequence[FileEntry],
        description: dict[str, Any],
    ) -> int:
        """Commit the staging area and delete old checkpoints; returns the bytes of the checkpoint's files."""
        failpoint("save:parts_written")
        content = {
            "step": step,
            "parts": names,
            "saved_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "trainer_version": __version__,
            "python_version": sys.version.split()[0],
            "versions": {name: version(name) for name in ("torch", "transformers")},
            "parent_step": max(self.store.steps(), default=None),
            **description,
            "files": [asdict(entry) for entry in files],
        }

        def check_fence() -> None:
            failpoint("save:manifest_written")
            self._fence()

        self.store.commit(staging, step, content, check_fence)
        failpoint("save:published")
        with _warned():
            self._committed(step)
        with _warned():
            self.store.write_latest(step)
        failpoint("save:hinted")
        with _warned():
            for name in self.store.archived(step):
                self.store.remove(name)
        with _warned():
            scores = {one: self._score(one) if self.retention.best > 0 else None for one in self.store.steps()}
            protected = {step, *self.store.not_yet_uploaded()} | ({self.resumed_from} - {None})
            for old in self.retention.disposable(scores, protected):  # type: ignore[arg-type]
                self.store.delete(old)
        return sum(entry.bytes for entry in files)

    def _score(self, step: int) -> float | None:
        """Return the best metric at `step`; None if it was not measured, or if the run was compared by another metric.
        Raises CheckpointError: the checkpoint may be whole, and cannot be read now."""
        try:
            score = manifests.read(self.store.path(step)).manifest
        except CorruptCheckpointError:
            return None
        return score.get("score") if score.get("score_metric") == self.retention.best_metric else None

    # ---------------------------------------------------------------------------------------------------
    # Finding and loading

    def latest(self, level: str = "hash") -> Checkpoint | None:
        """Return the newest valid checkpoint; None if there is none at all. Newer damaged ones are skipped.

        Args:
            level: of the check (see `manifest.VERIFY`).

        Raises:
            UserError: there are checkpoints but none is valid; or the newest has another format, or cannot be read,
                and may be valid.
        """
        problems: list[str] = []
        for step in reversed(self.store.steps()):
            unreadable: UserError | None = None
            for path in self.store.locations(step):
                try:
                    if path in self.damaged:
                        raise self.damaged[path]
                    checkpoint = manifests.verify(path, level)
                except CorruptCheckpointError as error:
                    problems.append(str(error))
                except UnreadableError as error:
                    unreadable = error
                except StoreError as error:
                    unreadable = StoreError(f"{path}: {error}")
                else:
                    for problem in problems:
                        LOG.warning("skipped a damaged checkpoint: %s", problem)
                    return checkpoint
            if unreadable is not None:
                raise type(unreadable)(
                    f"trainer.resume_mode=latest: {unreadable}; the checkpoint may be whole, so the run does not "
                    "continue from an older one: make it readable, or move it away"
                ) from unreadable
        if problems:
            raise UserError(
                f"trainer.resume_mode=latest: no checkpoint in {self.store.root} is valid: {'; '.join(problems)}; "
                "repair one, move them away to start over, or name another with trainer.resume_mode=from_path"
            )
        return None

    def load(self, checkpoint: Checkpoint, components: Sequence[Component], restore: Restore | None = None) -> None:
        """Restore these components from a checkpoint. `restore`: the kinds of state to restore; None: all. Raises
        UserError: the checkpoint lacks a component, or components of it cannot be used."""
        saved = checkpoint.manifest["parts"]
        missing = [component.name for component in components if component.name not in saved]
        if missing:
            raise UserError(
                f"trainer.resume_path={checkpoint.path}: the checkpoint has no {' and no '.join(missing)}; it holds "
                f"{', '.join(saved)}"
            )
        refused: list[UserError] = []
        for component in sorted(components, key=lambda component: component.is_large):
            if refused and component.is_large:
                break
            try:
                component.load(checkpoint, restore or Restore())
            except UserError as error:
                refused.append(error)
        if len(refused) == 1:
            raise refused[0]
        if refused:
            raise UserError(as_list(f"{checkpoint.path} cannot be used:", [str(error) for error in refused]))
        if checkpoint.path in self.store.locations(checkpoint.step):
            self.resumed_from = checkpoint.step

    def clean_up(self) -> None:
        """Remove what interrupted saves and deletions have left. The caller must hold the run's lock."""
        for tier in self.store.tiers:
            tier.fence()  # a former owner of the lock may be in the middle of a commit
            for name, kind in tier.orphans().items():
                try:
                    tier.remove(name)
                except OSError as error:
                    LOG.warning("%s/%s cannot be removed: %s", tier.root, name, error)
                else:
                    LOG.log(self._log_level, "removed %s/%s, %s", tier.root, name, kind)

    def archive(self, after: int) -> list[str]:
        """Take checkpoints newer than `after` out of service, by renaming; returns their new names.

        Each is deleted when its step is saved again.
        """
        names = [self.store.archive(step) for step in self.store.steps() if step > after]
        for name in names:
            LOG.info("archived %s", name)
        return names


def _finish(finishers: Sequence[Callable[[], list[FileEntry]]], failure: Exception | None) -> list[FileEntry]:
    """Let all components that have begun end, as they must before the next save; then raise the first error."""
    files: list[FileEntry] = []
    first: BaseException | None = failure
    for finish in finishers:
        try:
            files += finish()
        except BaseException as error:
            first = first or error
    if first is not None:
        raise first
    return files


@contextlib.contextmanager
def _warned() -> Iterator[None]:
    """Log an error of the block, which follows a save, as a warning."""
    try:
        yield
    except (OSError, CheckpointError) as error:
        LOG.warning("%s", error)
