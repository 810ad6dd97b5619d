"""Saving and loading whole checkpoints: parts register by name, a manifest commits them.

A save writes to `.writing-global_step_N-<token>`, where no reader looks; makes every file durable and hashes
it; writes `manifest.json`; and renames the directory to `global_step_N`. That rename is the commit: a
directory is a checkpoint if and only if its manifest agrees with its files. The hint file and the deletion
of old checkpoints come after. Everything past the copying of the state happens on another thread, while
training continues; at most one save is under way.

    .writing-…     a save under way, or one that was killed
    .deleting-…    taken out of service by retention, not gone yet
    .aside-…       newer than the checkpoint that the run went back to; gone once its step is saved again
"""

from __future__ import annotations

import contextlib
import json
import posixpath
import secrets
import sys
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from trainer import __version__
from trainer.checkpoint import manifest as manifests
from trainer.checkpoint.manifest import STEP_DIR, DamagedError, FileEntry
from trainer.checkpoint.retention import Retention
from trainer.checkpoint.storage import PROBE, Storage
from trainer.documents import Shape
from trainer.durable import digest_bytes
from trainer.errors import UserError
from trainer.failpoints import failpoint

HINT = "latest_ckpt_global_step.txt"
_TEST_BYTES = 64 << 20
WRITING, DELETING, ASIDE = ".writing-", ".deleting-", ".aside-"


@dataclass(frozen=True)
class Part:
    """One thing that a checkpoint holds.

    `begin(directory)` takes the state as it is now and returns at once; what it returns is called on another
    thread, writes below the directory (or waits for who does) and returns the files, durable and hashed.
    `load(directory)` restores the state.
    """

    name: str
    begin: Callable[[str], Callable[[], list[FileEntry]]]
    load: Callable[[str], None]


def files_part(name: str, content: Callable[[], dict[str, bytes]], load: Callable[[str], None]) -> Part:
    """A part of small files: `content()` returns their bytes by path below the checkpoint."""

    def begin(directory: str) -> Callable[[], list[FileEntry]]:
        files = content()

        def write() -> list[FileEntry]:
            storage = Storage(directory)
            for path, data in files.items():
                storage.write(path, data)
            return [FileEntry(path, len(data), digest_bytes(data)) for path, data in files.items()]

        return write

    return Part(name, begin, load)


def json_part(
    name: str, state: Callable[[], dict], restore: Callable[[dict], None], shape: dict[Any, Shape] | None = None
) -> Part:
    """A part kept as `{name}.json`.

    Args:
        shape: of what `restore` takes; a file of another shape is refused.
    """
    file = f"{name}.json"
    return files_part(
        name,
        lambda: {file: json.dumps(state(), indent=2, sort_keys=True).encode()},
        lambda directory: restore(manifests.read_object(directory, file, shape)),
    )


@dataclass(frozen=True)
class Outcome:
    """How a save ended."""

    step: int
    path: str
    seconds: float
    """From its begin to its commit or failure."""
    bytes: int = 0
    error: str | None = None
    warnings: tuple[str, ...] = ()
    """What went wrong after the commit: the hint, deletions."""


class CheckpointManager:
    """The checkpoints of one run below `ckpt_path`.

    Args:
        fence: called before a save and before its commit; raises `UserError` when this process may no longer
            write here.
        committed: called with its step after each commit.
    """

    def __init__(
        self,
        ckpt_path: str,
        retention: Retention | None = None,
        verify: str = "hash",
        fence: Callable[[], None] = lambda: None,
        committed: Callable[[int], None] = lambda step: None,
    ):
        self.storage = Storage(ckpt_path)
        self.retention = retention or Retention()
        self.verify = verify
        self.resumed_from: int | None = None  # a step below this root that the run was resumed from
        self._fence = fence
        self._committed = committed
        self._parts: list[Part] = []
        self._saving: threading.Thread | None = None
        self._outcomes: list[Outcome] = []

    def register(self, part: Part) -> None:
        assert part.name not in [p.name for p in self._parts], part.name
        self._parts.append(part)

    # ---------------------------------------------------------------------------------------------------
    # Saving

    def save(self, step: int, description: dict[str, Any]) -> None:
        """Begin to write `global_step_{step}`: take the state of all parts now, write and commit on a thread.

        Waits first for a save that is still under way. How it ended is what `outcomes` returns.

        Args:
            description: what the manifest says besides its files (ranks, mesh, versions, config digest, score).
        """
        self.wait()
        started = time.monotonic()
        failpoint("save:begin")
        name = f"global_step_{step}"
        # A token of its own: a process of a killed run that still writes cannot write into this save.
        writing = f"{WRITING}{name}-{secrets.token_hex(4)}"
        finishers: list[Callable[[], list[FileEntry]]] = []
        try:
            self._fence()
            self.storage.make(writing)
            for part in self._parts:
                finishers.append(part.begin(self.storage.path(writing)))
        except (OSError, UserError) as error:
            for finish in finishers:  # what has begun must end before the next save begins
                with contextlib.suppress(OSError):
                    finish()
            _quietly(self.storage.remove, writing)
            self._outcomes.append(Outcome(step, "", time.monotonic() - started, error=str(error)))
            return

        def run() -> None:
            try:
                total, warnings = self._commit(step, name, writing, finishers, description)
                path = self.storage.path(name)
                outcome = Outcome(step, path, time.monotonic() - started, total, warnings=tuple(warnings))
            except Exception as error:  # whatever it was, training decides what to do about it
                outcome = Outcome(step, "", time.monotonic() - started, error=f"{error}" or repr(error))
                _quietly(self.storage.remove, writing)
            self._outcomes.append(outcome)

        self._saving = threading.Thread(target=run, name=f"save-{step}", daemon=True)
        self._saving.start()

    def outcomes(self) -> list[Outcome]:
        """Saves that ended since this was last asked."""
        ended, self._outcomes = self._outcomes, []
        return ended

    def wait(self, timeout_s: float | None = None) -> None:
        """Until no save is under way."""
        if self._saving is not None:
            self._saving.join(timeout_s)
            if not self._saving.is_alive():
                self._saving = None

    @property
    def saving(self) -> bool:
        return self._saving is not None and self._saving.is_alive()

    def _commit(self, step: int, name: str, writing: str, finishers: list[Callable[[], list[FileEntry]]],
                description: dict[str, Any]) -> tuple[int, list[str]]:  # fmt: skip
        files = [entry for finish in finishers for entry in finish()]
        failpoint("save:parts_written")
        self.storage.sync(writing)  # the directories; the files are durable
        content = {
            "step": step,
            "parts": [part.name for part in self._parts],
            "saved_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "trainer_version": __version__,
            "python_version": sys.version.split()[0],
            "versions": {name: version(name) for name in ("torch", "transformers")},
            "parent_step": max(self.steps(), default=None),
            **description,
        }
        data = manifests.dump(content, files)
        self.storage.write(f"{writing}/{manifests.NAME}", data)
        failpoint("save:manifest_written")
        self._fence()
        self.storage.rename(writing, name)
        failpoint("save:published")
        warnings: list[str] = []
        _collect(warnings, lambda: self._committed(step))
        _collect(warnings, lambda: self.storage.write(HINT, f"{step}\n".encode()))
        failpoint("save:hinted")
        _collect(warnings, lambda: self._remove_aside(step))
        _collect(warnings, lambda: self._prune(step))
        return sum(entry.bytes for entry in files) + len(data), warnings

    def _remove_aside(self, committed: int) -> None:
        for entry in self.storage.list():
            if entry.startswith(f"{ASIDE}global_step_{committed}-"):
                self.storage.remove(entry)

    def _prune(self, committed: int) -> None:
        steps = self.steps()
        scores = {step: self._score(step) for step in steps} if self.retention.best > 0 else dict.fromkeys(steps)
        protected = {committed} | ({self.resumed_from} - {None})
        self.delete(self.retention.disposable(scores, protected))  # type: ignore[arg-type]

    def delete(self, steps: list[int]) -> None:
        """Delete these checkpoints."""
        for step in steps:
            # Out of service in one step, then deleted: never a directory that is half a checkpoint.
            doomed = f"{DELETING}global_step_{step}-{secrets.token_hex(4)}"
            self.storage.rename(f"global_step_{step}", doomed)
            failpoint("save:deleting")
            self.storage.remove(doomed)

    def _score(self, step: int) -> float | None:
        """The best metric as measured at `step`; None where it was not, or where the run had another one."""
        try:
            manifest = manifests.read(self.storage.path(f"global_step_{step}"))
        except DamagedError:
            return None
        wanted = self.retention.best_metric
        return manifest.get("score") if manifest.get("score_metric", wanted) == wanted else None

    # ---------------------------------------------------------------------------------------------------
    # Finding and loading

    def steps(self) -> list[int]:
        """Steps of the directories that are named like checkpoints, ascending."""
        return sorted(int(match[1]) for match in map(STEP_DIR.match, self.storage.list()) if match)

    def path(self, step: int) -> str:
        return self.storage.path(f"global_step_{step}")

    def latest(self, before: int | None = None) -> tuple[str | None, list[str]]:
        """The newest valid checkpoint (None: there is none at all), and what was wrong with newer ones.

        Args:
            before: consider only steps below this.

        Raises:
            UserError: there are checkpoints, but none is valid.
        """
        problems: list[str] = []
        for step in reversed(self.steps()):
            if before is not None and step >= before:
                continue
            try:
                manifests.verify(self.path(step), self.verify)
                return self.path(step), problems
            except DamagedError as error:
                problems.append(str(error))
        if problems:
            raise UserError(
                f"trainer.resume_mode=latest: no checkpoint in {self.storage.root} is valid: {'; '.join(problems)}; "
                "mend one, move them away to start over, or name another with trainer.resume_mode=from_path"
            )
        return None, []

    def test_storage(self, damaged: int) -> str:
        """Try the storage after `damaged` damaged checkpoints in a row; returns what to tell the user.

        Raises:
            UserError: a file was not written, or not read back as it was.
        """
        root = self.storage.root
        try:
            self.storage.probe(_TEST_BYTES)
        except OSError as error:
            raise UserError(
                f"trainer.ckpt_path={root}: the {damaged} newest checkpoints are damaged, and a test file of "
                f"{_TEST_BYTES >> 20} MiB could not be kept there ({error.strerror or error}); the storage is failing: "
                "repair it, or continue elsewhere with trainer.resume_mode=from_path"
            ) from error
        return (
            f"WARNING: {damaged} damaged checkpoints in a row are a sign of failing storage; a test file of "
            f"{_TEST_BYTES >> 20} MiB was written to {root} and read back well"
        )

    def load(self, path: str, only: Collection[str] | None = None) -> int:
        """Restore all registered parts (or those named in `only`) from `path`; returns its step.

        Raises:
            UserError: it lacks a part.
        """
        manifest = manifests.read(path)
        for part in self._parts:
            if only is not None and part.name not in only:
                continue
            if part.name not in manifest["parts"]:
                raise UserError(f"trainer.resume_path={path}: the checkpoint has no {part.name}; "
                                f"it holds {', '.join(manifest['parts'])}")  # fmt: skip
            part.load(path)
        if posixpath.dirname(path.rstrip("/")) == self.storage.root.rstrip("/"):
            self.resumed_from = manifest["step"]
        return manifest["step"]

    def clean_up(self) -> list[str]:
        """Remove what interrupted saves and deletions have left; returns one line for each.

        Only for the process that holds the run's lock.
        """
        kinds = {WRITING: "an interrupted save", DELETING: "an interrupted deletion", PROBE: "an interrupted test"}
        notes = []
        for entry in self.storage.list():
            kind = next((kind for prefix, kind in kinds.items() if entry.startswith(prefix)), None)
            if kind is not None:
                problem = _quietly(self.storage.remove, entry)
                notes.append(f"removed {entry}, {kind}" if problem is None else f"{entry} cannot be removed: {problem}")
        return notes

    def set_aside(self, after: int) -> list[str]:
        """Take checkpoints newer than `after` out of service, by renaming; returns their new names.

        They are deleted when their step is saved again, not before.
        """
        moved = []
        for step in self.steps():
            if step > after:
                aside = f"{ASIDE}global_step_{step}-{secrets.token_hex(4)}"
                self.storage.rename(f"global_step_{step}", aside)
                moved.append(aside)
        return moved


def _collect(warnings: list[str], action: Callable[[], None]) -> None:
    try:
        action()
    except OSError as error:
        warnings.append(str(error))


def _quietly(action: Callable[[str], None], entry: str) -> str | None:
    try:
        action(entry)
    except OSError as error:
        return str(error)
    return None
