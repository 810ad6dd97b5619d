"""Two jobs write to one location, where operations fail before or after they are done: no step is ever a mixture.

The lock keeps two jobs apart, except for a moment: a job that stood still between its last look at the lock and its
commit. So the second job acts between all operations of the first, and in the middle of its commits.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.fault_proxy import ERROR, LOST, PASS
from trainer.checkpoint import manifest as manifests
from trainer.checkpoint.manager import CheckpointManager
from trainer.checkpoint.store import CheckpointStore, open_store
from trainer.files.atomic_io import digest_bytes

STEPS, FILES = (1, 2), ("a", "folder/b")
WRITER, STEP, CHOICE = st.sampled_from((0, 1)), st.sampled_from(STEPS), st.booleans()
OUTCOMES = st.lists(st.sampled_from((PASS, PASS, ERROR, LOST)), max_size=12)
"""What happens to the next operations; those after them succeed."""
MEANWHILE = st.sampled_from(("nothing", "saves", "cleans up"))
SAVE = st.tuples(st.just("save"), WRITER, STEP, OUTCOMES, MEANWHILE)
OPERATION = st.one_of(
    *[SAVE] * 3,
    st.tuples(st.just("take_out_of_service"), WRITER, OUTCOMES, CHOICE),
    st.tuples(st.just("clean_up"), WRITER),
)
"""A method of `TwoWriters`, and its arguments."""
REFUSED = (errno.EEXIST, errno.EBUSY, errno.ENOTEMPTY)
"""Errors of a commit that is not done, because another job has written."""


class TwoWriters:
    """Both jobs train the same run, so what one of them saves in a step is always the same.

    Args:
        root: an empty location.
        outcomes: decides about the next operations.
    """

    def __init__(self, root: str, outcomes: deque[str]):
        self.root, self.outcomes = root, outcomes
        self.stores: list[CheckpointStore] = [open_store(root), open_store(root)]
        self.possible: dict[int, set[int | None]] = defaultdict(lambda: {None})  # who may have committed a step

    def save(self, writer: int, step: int, outcomes: list[str], meanwhile: str) -> None:
        """Save a step. Immediately before the commit, the other job perhaps saves both, or removes all leftovers."""
        self.outcomes.extend(outcomes)
        self._save(writer, step, meanwhile)

    def _save(self, writer: int, step: int, meanwhile: str = "nothing") -> None:
        store = self.stores[writer]
        staging = None
        try:
            staging = store.begin(step)
            for name in FILES:
                staging.write(name, content(writer, step, name))
            store.commit(staging, step, manifest(writer, step), lambda: self._do_meanwhile(1 - writer, meanwhile))
        except OSError as error:
            if error.errno not in REFUSED:
                self.possible[step].add(writer)
            with contextlib.suppress(OSError):
                if staging is not None:
                    store.abort(staging)
        else:
            assert self.possible[step] != {1 - writer}, "the other job's checkpoint has been overwritten"
            self.possible[step] = {writer}

    def _do_meanwhile(self, writer: int, what: str) -> None:
        if what == "cleans up":
            with contextlib.suppress(OSError):  # the store fails
                self.clean_up(writer)
        elif what == "saves":
            for step in STEPS:
                self._save(writer, step)

    def take_out_of_service(self, writer: int, outcomes: list[str], aside: bool) -> None:
        """Delete the newest checkpoint, or set it aside."""
        store = self.stores[writer]
        steps = store.steps()
        if not steps:
            return
        self.outcomes.extend(outcomes)
        try:
            if aside:
                store.archive(steps[-1])
            else:
                store.remove(store.tombstone(steps[-1]))
        except OSError:
            self.possible[steps[-1]].add(None)
        else:
            self.possible[steps[-1]] = {None}

    def clean_up(self, writer: int) -> None:
        CheckpointManager(self.stores[writer]).clean_up()

    def check_steps(self) -> None:
        """Check that each step is one that a job has saved, or is not there."""
        self.outcomes.clear()
        store = open_store(self.root)
        committed = store.steps()
        for step in STEPS:
            if step not in committed:
                assert None in self.possible[step], f"step {step} is gone"
                continue
            checkpoint = manifests.verify(store.path(step))
            writer = checkpoint.manifest["ranks"]
            assert writer in self.possible[step], f"step {step} is that of job {writer}"
            assert [checkpoint.files.get(name) for name in FILES] == [content(writer, step, name) for name in FILES]
            self.possible[step] = {writer}


def content(writer: int, step: int, name: str) -> bytes:
    return f"{name} of job {writer} in step {step}".encode()


def manifest(writer: int, step: int) -> manifests.Fields:
    contents = {name: content(writer, step, name) for name in FILES}
    files = [{"path": name, "bytes": len(data), "hash": digest_bytes(data)} for name, data in contents.items()]
    fields = {"step": step, "parts": [], "saved_at": "2026-11-22T00:00:00+00:00", "parent_step": None, "ranks": writer}
    return {**fields, "files": files}


def try_operations(root: Callable[[], str], outcomes: deque[str], examples: int) -> None:
    """Try `examples` lists of operations, each in an empty location, and check all steps after each operation."""

    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(OPERATION, min_size=2, max_size=6))
    def check(operations: list[tuple]) -> None:
        writers = TwoWriters(root(), outcomes)
        for name, *arguments in operations:
            getattr(writers, name)(*arguments)
            writers.check_steps()

    check()


def test_an_object_store_holds_the_older_or_the_newer_state(bucket_behind_proxy, faults, monkeypatch):
    monkeypatch.setattr("trainer.checkpoint.buckets.MAX_ATTEMPTS", 2)
    outcomes: deque[str] = deque()
    faults.plan = lambda method, path: outcomes.popleft() if outcomes else PASS
    try_operations(lambda: f"{bucket_behind_proxy}/{secrets.token_hex(4)}", outcomes, examples=4)


@contextlib.contextmanager
def failing_disk(outcomes: deque[str], patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let renames and syncs fail, before or after they are done."""

    def fail(function: Callable[..., None]) -> Callable[..., None]:
        def call(*args: str) -> None:
            outcome = outcomes.popleft() if outcomes else PASS
            if outcome == ERROR:
                raise OSError(5, "Input/output error")
            function(*args)
            if outcome == LOST:
                raise OSError(5, "Input/output error")

        return call

    with patch.context() as inner:
        inner.setattr("os.rename", fail(os.rename))
        inner.setattr("os.replace", fail(os.replace))
        inner.setattr("os.fsync", fail(os.fsync))
        yield


@pytest.mark.parametrize("storage", ["local", "object"])
def test_what_another_job_has_cleaned_up_is_not_committed(storage, tmp_path, bucket_behind_proxy):
    """A job checks its lock and hangs. Another job takes over the lock. Then the first job continues."""
    root = str(tmp_path / "store") if storage == "local" else f"{bucket_behind_proxy}/{secrets.token_hex(4)}"
    writers = TwoWriters(root, deque())
    for meanwhile in ("cleans up", "nothing"):
        writers.save(0, 1, [], meanwhile)
        writers.check_steps()
        assert open_store(root).steps() == ([] if meanwhile == "cleans up" else [1])
        assert not open_store(root).orphans()


def test_a_staging_area_that_is_half_deleted_is_not_committed(tmp_path, monkeypatch):
    store = open_store(str(tmp_path / "store"))
    staging = store.begin(1)
    monkeypatch.setattr("shutil.rmtree", lambda path: store.commit(staging, 1, manifest(0, 1), lambda: None))
    with pytest.raises(FileNotFoundError):
        open_store(store.root).remove(os.path.basename(staging.root))
    assert store.steps() == []


def test_a_job_does_not_clean_up_what_it_is_uploading(bucket_behind_proxy):
    """The ranks of a job may die, and start again, while it uploads."""
    store = open_store(f"{bucket_behind_proxy}/{secrets.token_hex(4)}")
    staging = store.begin(1)
    for name in FILES:
        staging.write(name, content(0, 1, name))
    CheckpointManager(store).clean_up()
    store.commit(staging, 1, manifest(0, 1), lambda: CheckpointManager(store).clean_up())
    manifests.verify(store.path(1))


def test_a_local_store_holds_the_older_or_the_newer_state(tmp_path: Path, monkeypatch):
    outcomes: deque[str] = deque()
    with failing_disk(outcomes, monkeypatch):
        try_operations(lambda: str(tmp_path / secrets.token_hex(4)), outcomes, examples=20)
