"""The transaction: only whole checkpoints count."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.checkpoints import give_newer_format, hidden, manager, parts_of, save
from tests.support.jobs import wait_until
from trainer import __version__
from trainer.checkpoint.components import Component, json_component
from trainer.checkpoint.inspection import describe, read_named
from trainer.checkpoint.lock import RunLock
from trainer.checkpoint.manager import Retention
from trainer.checkpoint.manifest import FORMAT_VERSION, FileEntry, verify
from trainer.checkpoint.storage import Storage
from trainer.errors import UserError
from trainer.files.atomic_io import digest_bytes


def test_a_load_restores_the_saved_state(tmp_path):
    state = {"n": 3, "bytes": b"abc"}
    path = save(manager(tmp_path), 10, parts_of(state), ranks=2)
    assert path == str(tmp_path / "global_step_10")
    manifest = verify(path).manifest
    assert (manifest["step"], manifest["ranks"], manifest["parent_step"]) == (10, 2, None)
    assert {f["path"]: f["bytes"] for f in manifest["files"]} == {"counters.json": 12, "weights/shard": 3}
    assert (tmp_path / "latest_ckpt_global_step.txt").read_text() == "10\n"
    state.update(n=4, bytes=b"xyz")
    for step in (11, 12):
        assert verify(save(manager(tmp_path), step, parts_of(state))).manifest["parent_step"] == step - 1
    manager(tmp_path).load(verify(path), parts_of(state))
    assert state == {"n": 3, "bytes": b"abc"}


def test_a_save_takes_the_state_of_its_call_and_one_save_is_under_way_at_a_time(tmp_path):
    state, may_write, begun = {"n": 1, "bytes": b""}, threading.Event(), []
    checkpoints = manager(tmp_path)

    def begin(staging: Storage):
        begun.append(staging)
        return lambda: [] if may_write.wait(60) else []

    parts = [*parts_of(state), Component("slow", begin)]
    checkpoints.save(1, parts, {})
    state["n"] = 2
    assert checkpoints.saving and checkpoints.store.steps() == [] and checkpoints.results() == []
    second = threading.Thread(target=checkpoints.save, args=(2, parts, {}))
    second.start()
    second.join(0.2)
    assert len(begun) == 1, "the second save began beside the first"
    may_write.set()
    second.join(60)
    checkpoints.wait()
    assert [outcome.step for outcome in checkpoints.results()] == [1, 2]
    counters = [json.loads((tmp_path / f"global_step_{n}/counters.json").read_text()) for n in (1, 2)]
    assert counters == [{"n": 1}, {"n": 2}]


def test_a_failed_save_keeps_the_previous_checkpoint_and_leaves_no_files(tmp_path):
    checkpoints = manager(tmp_path)
    first = save(checkpoints, 1)
    broken = manager(tmp_path)

    def finish():
        raise OSError("No space left on device")

    broken.save(2, [*parts_of({"n": 1, "bytes": b"abc"}), Component("full", lambda staging: finish)], {})
    broken.wait()
    (outcome,) = broken.results()
    assert outcome.error == "No space left on device"
    assert checkpoints.latest() == verify(first) and hidden(tmp_path) == []
    assert verify(save(checkpoints, 2)).step == 2


@pytest.mark.parametrize("fails_at", ["begin", "end"])
def test_all_components_of_a_failed_save_end_and_the_first_error_is_its_result(tmp_path, fails_at):
    """Ranks that still write would take the answer of this save for that of the next one."""
    ended, caller = [], threading.get_ident()

    def begin(name: str, error: Exception | None = None) -> Component:
        def finish() -> list[FileEntry]:
            ended.append((name, threading.get_ident() != caller))
            if error is not None:
                raise error
            return []

        return Component(name, lambda staging: finish)

    def refuse(staging: Storage):
        raise OSError("no space")

    checkpoints = manager(tmp_path)
    parts = [begin("ahead", ValueError("a batch")), begin("models", RuntimeError("a rank"))]
    checkpoints.save(1, [*parts, *([Component("full", refuse), begin("never")] if fails_at == "begin" else [])], {})
    checkpoints.wait()
    (result,) = checkpoints.results()
    assert ended == [("ahead", True), ("models", True)], "they end on the thread of the save, which may wait"
    assert result.error == ("no space" if fails_at == "begin" else "a batch") and hidden(tmp_path) == []
    assert checkpoints.store.steps() == []


def test_a_commit_that_is_done_but_seems_to_have_failed_is_completed_by_the_next_save(tmp_path, monkeypatch):
    checkpoints, rename = manager(tmp_path), os.rename

    def rename_and_fail(source: str, target: str) -> None:
        rename(source, target)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as disk:
        disk.setattr(os, "rename", rename_and_fail)
        checkpoints.save(1, parts_of({"n": 1, "bytes": b"abc"}), {})
        checkpoints.wait()
    (outcome,) = checkpoints.results()
    assert "Input/output error" in outcome.error
    assert save(checkpoints, 1) == str(tmp_path / "global_step_1")
    assert verify(str(tmp_path / "global_step_1")).step == 1 and hidden(tmp_path) == []
    other = manager(tmp_path)
    other.save(1, parts_of({"n": 1, "bytes": b"abc"}), {})
    other.wait()
    assert "committed by another job" in other.results()[0].error and hidden(tmp_path) == []


def test_files_that_a_rank_adds_to_a_failed_save_are_deleted_by_the_next(tmp_path):
    """A rank may still write when another one has failed; on a full disk, its files would make all later saves fail."""
    checkpoints, stagings = manager(tmp_path), []

    def begin(staging: Storage):
        stagings.append(staging)
        raise OSError("No space left on device")

    checkpoints.save(1, [*parts_of({"n": 1, "bytes": b"abc"}), Component("full", begin)], {})
    checkpoints.wait()
    (outcome,) = checkpoints.results()
    assert outcome.error is not None and hidden(tmp_path) == []
    os.makedirs(stagings[0].root)
    stagings[0].write("late", b"abc")
    save(checkpoints, 2)
    assert hidden(tmp_path) == []


def test_a_large_part_is_not_loaded_once_a_small_one_is_refused(tmp_path):
    loaded = []

    def refuse(*_: object) -> None:
        raise UserError("another seed")

    def part(name: str, is_large: bool, load=lambda *_: None) -> Component:
        return Component(
            name, lambda staging: list, lambda *given: (loaded.append(name), load(*given)), is_large=is_large
        )

    parts = [part("models", True), part("data", False, refuse), part("state", False), part("seed", False, refuse)]
    checkpoints = manager(tmp_path)
    checkpoint = verify(save(checkpoints, 1, [*parts_of({"n": 1, "bytes": b"abc"}), *parts]))
    with pytest.raises(UserError, match="(?s)cannot be used:.*another seed.*another seed"):
        checkpoints.load(checkpoint, parts)
    assert loaded == ["data", "state", "seed"] and checkpoints.resumed_from is None
    checkpoints.load(checkpoint, [part("models", True), part("state", False)])
    assert loaded[3:] == ["state", "models"] and checkpoints.resumed_from == 1


def test_the_step_of_a_fork_s_parent_protects_none_of_its_own(tmp_path):
    parent = verify(save(manager(tmp_path / "parent"), 2))
    fork = manager(tmp_path / "fork", Retention(newest=1))
    fork.load(parent, parts_of({}))
    for step in (1, 2, 3):
        save(fork, step)
    assert fork.store.steps() == [3]


def test_a_directory_removed_during_a_save_fails_only_the_save(tmp_path):
    checkpoints = manager(tmp_path)
    first = save(checkpoints, 1)

    def begin(staging: Storage):
        return lambda: shutil.rmtree(staging.root) or []

    checkpoints.save(2, [*parts_of({"n": 1, "bytes": b"abc"}), Component("vandal", begin)], {})
    checkpoints.wait()
    (outcome,) = checkpoints.results()
    assert outcome.error is not None and "No such file" in outcome.error
    assert checkpoints.latest() == verify(first) and checkpoints.store.steps() == [1]


def test_a_job_that_lost_its_lock_does_not_commit(tmp_path):
    first = RunLock(str(tmp_path), 60)
    first.acquire()
    checkpoints = manager(tmp_path / "checkpoints", fence=first.check)
    save(checkpoints, 1)
    os.remove(first.path)
    with RunLock(str(tmp_path), 60) as second:
        second.acquire()
        checkpoints.save(2, [], {})
        checkpoints.wait()
        assert "lost the run directory" in checkpoints.results()[0].error
        assert checkpoints.store.steps() == [1]
    first.release()


def test_latest_is_the_newest_valid_checkpoint_and_does_not_read_the_hint(tmp_path, caplog):
    checkpoints = manager(tmp_path)
    assert checkpoints.latest() is None
    for step in (1, 2, 10):
        save(checkpoints, step)
    (tmp_path / "latest_ckpt_global_step.txt").write_text("1\n")
    assert checkpoints.latest() == verify(str(tmp_path / "global_step_10")) and not caplog.messages
    (tmp_path / "global_step_10/weights/shard").write_bytes(b"abd")
    assert checkpoints.latest() == verify(str(tmp_path / "global_step_2"))
    (message,) = caplog.messages
    assert message.startswith("skipped a damaged checkpoint") and "weights/shard" in message
    for step in (1, 2):
        (tmp_path / f"global_step_{step}/manifest.json").unlink()
    with pytest.raises(UserError, match="no checkpoint in .* is valid.*weights/shard"):
        checkpoints.latest()


def test_a_newest_checkpoint_of_a_newer_format_is_refused_and_stays(tmp_path, caplog):
    checkpoints = manager(tmp_path)
    for step in (1, 2):
        save(checkpoints, step)
    give_newer_format(tmp_path / "global_step_2")
    caplog.clear()
    sentence = (
        f"{tmp_path}/global_step_2: 9.9 of this program has written it in format {FORMAT_VERSION + 1}, and "
        f"{__version__} reads format {FORMAT_VERSION}; install the version that wrote it, or move the checkpoint away"
    )
    with pytest.raises(UserError, match=f"^{re.escape(sentence)}$"):
        checkpoints.latest()
    assert checkpoints.store.steps() == [1, 2] and not caplog.messages
    assert describe(str(tmp_path / "global_step_2"), "hash")["readable"] is False, "it is not called damaged"
    with pytest.raises(UserError, match="install the version that wrote it"):
        read_named(str(tmp_path))


def test_retention_deletes_nothing_while_a_score_cannot_be_read(tmp_path, caplog):
    checkpoints = manager(tmp_path, Retention(newest=1, best=1))
    save(checkpoints, 1)
    give_newer_format(tmp_path / "global_step_1")
    save(checkpoints, 2)
    assert checkpoints.store.steps() == [1, 2] and "global_step_1: 9.9 of this program" in caplog.text


def test_leftovers_are_removed_and_set_aside_checkpoints_are_kept_until_replaced(tmp_path, caplog):
    caplog.set_level("INFO")
    checkpoints = manager(tmp_path)
    for step in (1, 2):
        save(checkpoints, step)
    (tmp_path / ".writing-global_step_3-ab").mkdir()
    (tmp_path / ".deleting-global_step_0-cd").mkdir()
    caplog.clear()
    checkpoints.clean_up()
    assert [message.split(",")[1] for message in caplog.messages] == [
        " an interrupted deletion",
        " an interrupted save",
    ]
    assert hidden(tmp_path) == []
    checkpoints.archive(after=1)
    assert checkpoints.latest().step == 1 and hidden(tmp_path) == [".aside-"]
    checkpoints.clean_up()
    assert hidden(tmp_path) == [".aside-"], "it is not replaced yet"
    save(checkpoints, 2)
    assert checkpoints.store.steps() == [1, 2] and hidden(tmp_path) == []


def test_retention_keeps_the_best_and_the_resumed_checkpoint(tmp_path):
    checkpoints = manager(tmp_path, Retention(newest=1, best=1))
    for step, score in ((1, 0.2), (2, 0.9), (3, 0.5)):
        save(checkpoints, step, score=score, score_metric="")
    assert checkpoints.store.steps() == [2, 3]
    again = manager(tmp_path, Retention(newest=1, best=1))
    again.load(again.latest(), [])
    for step, score in ((4, 0.1), (5, 0.3)):
        save(again, step, score=score, score_metric="")
    assert again.store.steps() == [2, 3, 5], "3 is what the run was resumed from"


def test_a_checkpoint_loses_its_name_before_its_files_are_deleted(tmp_path, monkeypatch):
    root = tmp_path / "checkpoints"
    checkpoints = manager(root, Retention(newest=1))
    save(checkpoints, 1)
    hinted, deleting = tmp_path / "hinted", tmp_path / "deleting"
    monkeypatch.setenv("TRAINER_FAILPOINT", f"save:hinted,1,{hinted}")
    checkpoints.save(2, parts_of({"n": 1, "bytes": b"abc"}), {})
    wait_until(hinted.exists)
    assert {"global_step_1", "global_step_2"} <= set(os.listdir(root)), "deleted before the next one was there"
    monkeypatch.setenv("TRAINER_FAILPOINT", f"save:deleting,1,{deleting}")
    hinted.unlink()
    wait_until(deleting.exists)
    assert not (root / "global_step_1").exists()
    assert [name for name in os.listdir(root) if name.startswith(".deleting-global_step_1-")]
    deleting.unlink()
    checkpoints.wait()
    assert checkpoints.store.steps() == [2] and hidden(root) == []


@pytest.fixture
def calls(monkeypatch) -> list[tuple[str, str]]:
    """What is made durable and renamed, in order, while the real calls run: `(fsync, path)`, `(rename, new path)`."""
    recorded: list[tuple[str, str]] = []

    def record(name: str, path_of) -> None:
        real = getattr(os, name)

        def call(*args, **kwargs):
            path = path_of(*args)
            result = real(*args, **kwargs)
            recorded.append(("fsync" if name == "fsync" else "rename", path))
            return result

        monkeypatch.setattr(os, name, call)

    record("fsync", lambda handle: os.readlink(f"/proc/self/fd/{handle}"))
    record("rename", lambda source, target: os.fspath(target))
    record("replace", lambda source, target: os.fspath(target))
    return recorded


def test_a_commit_syncs_writes_the_manifest_checks_the_fence_renames_and_hints_in_this_order(tmp_path, calls):
    root = tmp_path / "checkpoints"
    checkpoints = manager(root, fence=lambda: calls.append(("fence", "")))

    def begin(staging: Storage):
        def write() -> list[FileEntry]:
            for folder in ("a/b", "a/c"):
                os.makedirs(f"{staging.root}/{folder}", exist_ok=True)
                Path(staging.root, folder, "file").write_bytes(b"abc")
            digest = digest_bytes(b"abc")
            return [FileEntry(f"{folder}/file", 3, digest) for folder in ("a/b", "a/c")]

        return write

    path = save(
        checkpoints, 3, [Component("plain", begin), json_component("counters", lambda: {"n": 1}, lambda _: None)]
    )
    verify(path)
    commit = calls.index(("rename", path))
    (writing,) = {Path(name).parent for kind, name in calls if kind == "rename" and name.endswith("manifest.json")}
    manifest = calls.index(("rename", f"{writing}/manifest.json"))
    hint = calls.index(("rename", f"{root}/latest_ckpt_global_step.txt"))
    # Every file and every directory is durable before the manifest says so.
    written = [writing / name for name in ("a/b/file", "a/c/file", "counters.json", "a/b", "a/c", "a", "")]
    for each in written:
        assert ("fsync", str(each)) in calls[:manifest], each
    # The manifest is durable, and its name too, before the fence is asked; then the rename follows immediately.
    assert ("fsync", f"{writing}/manifest.json.tmp") in calls[:manifest]
    assert calls[manifest + 1 : commit + 2] == [
        ("fsync", str(writing)),
        ("fence", ""),
        ("rename", path),
        ("fsync", str(root)),
    ]
    assert calls[commit + 2 :] == [
        ("fsync", f"{root}/latest_ckpt_global_step.txt.tmp"),
        ("rename", f"{root}/latest_ckpt_global_step.txt"),
        ("fsync", str(root)),
    ]
    assert hint > commit


@contextlib.contextmanager
def other_user() -> Iterator[Path]:
    """Be a user whom permissions concern, as root is not, in the block; yields a directory that this user may enter."""
    with tempfile.TemporaryDirectory() as folder:  # below `tmp_path` no other user may enter
        os.chmod(folder, 0o777)
        before = os.geteuid()
        os.seteuid(before or 65534)
        try:
            yield Path(folder)
        finally:
            os.seteuid(before)
            for path in Path(folder).rglob("global_step_*"):
                path.chmod(0o755)


@pytest.mark.parametrize(
    "part", ["global_step_2/manifest.json", "global_step_2", "global_step_2/counters.json", "global_step_2/weights"]
)
def test_a_newest_checkpoint_that_may_not_be_read_is_not_skipped(part):
    with other_user() as folder:
        checkpoints = manager(folder)
        for step in (1, 2):
            save(checkpoints, step)
        mode = (folder / part).stat().st_mode & 0o777
        (folder / part).chmod(0)
        sentence = (
            rf"^trainer.resume_mode=latest: {folder}/global_step_2: .* cannot be read \(Permission denied\); the "
            "checkpoint may be whole, so the run does not continue from an older one: make it readable, or move it "
            "away$"
        )
        with pytest.raises(UserError, match=sentence):
            checkpoints.latest()
        (folder / part).chmod(mode)
        assert checkpoints.latest().step == 2


@given(
    steps=st.sets(st.integers(1, 60), min_size=1, max_size=20),
    newest=st.integers(-1, 5),
    best=st.integers(0, 4),
    mode=st.sampled_from(["max", "min"]),
    data=st.data(),
)
def test_retention_keeps_the_steps_of_its_rules(steps, newest, best, mode, data):
    scores = {step: data.draw(st.none() | st.integers(0, 5)) for step in steps}
    protected = data.draw(st.sets(st.sampled_from(sorted(steps)), max_size=2))
    gone = Retention(newest, best, mode).disposable(scores, protected)
    kept = sorted(steps - set(gone))
    assert max(steps) in kept and protected <= set(kept)
    if newest < 0:
        assert gone == []
    else:
        assert set(sorted(steps)[-max(1, newest) :]) <= set(kept)
    measured = {step: score for step, score in scores.items() if score is not None}
    if best and measured and newest >= 0:
        extreme = (max if mode == "max" else min)(measured.values())
        assert extreme in [measured.get(step) for step in kept]
        ranked = sorted(measured.values(), reverse=mode == "max")[:best]
        assert sorted((measured[s] for s in kept if s in measured), reverse=mode == "max")[: len(ranked)] == ranked
    needed = len(protected) + max(1, newest) + best
    assert newest < 0 or len(kept) <= needed


def test_of_two_equal_scores_the_earlier_is_kept():
    scores = {1: 0.1, 2: 0.5, 3: 0.5, 4: 0.3}
    assert Retention(newest=1, best=1).disposable(scores) == [1, 3]
    assert Retention(newest=1, best=1, best_mode="min").disposable({1: 0.5, 2: 0.1, 3: 0.1, 4: 0.3}) == [1, 3]
