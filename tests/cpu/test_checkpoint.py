"""The transaction: only whole checkpoints count, and nothing in one is executed or believed unchecked."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.ranks import run_ranks
from tests.support.checkpoints import hidden, manager, parts_of, save
from trainer.checkpoint import manifest as manifests
from trainer.checkpoint.lock import RunLock
from trainer.checkpoint.manifest import Checkpoint, DamagedError, verify
from trainer.checkpoint.parts import Part, Restore, json_part
from trainer.checkpoint.retention import Retention
from trainer.checkpoint.safe_dcp import load_metadata
from trainer.checkpoint.sharded import ShardedFiles
from trainer.checkpoint.store import CheckpointFiles
from trainer.errors import UserError

# ----------------------------------------------------------------------------------------------------------
# Saving


def test_what_is_saved_comes_back(tmp_path):
    state = {"n": 3, "bytes": b"abc"}
    path = save(manager(tmp_path), 10, parts_of(state), ranks=2)
    assert path == str(tmp_path / "global_step_10")
    manifest = verify(path).manifest
    assert (manifest["step"], manifest["ranks"], manifest["parent_step"]) == (10, 2, None)
    assert {f["path"]: f["bytes"] for f in manifest["files"]} == {"counters.json": 12, "weights/shard": 3}
    assert (tmp_path / "latest_ckpt_global_step.txt").read_text() == "10\n"
    state.update(n=4, bytes=b"xyz")
    assert verify(save(manager(tmp_path), 11, parts_of(state))).manifest["parent_step"] == 10
    manager(tmp_path).load(verify(path), parts_of(state))
    assert state == {"n": 3, "bytes": b"abc"}


def test_the_state_is_that_of_the_call_and_one_save_is_under_way_at_a_time(tmp_path):
    state, may_write, begun = {"n": 1, "bytes": b""}, threading.Event(), []
    checkpoints = manager(tmp_path)

    def begin(draft: CheckpointFiles):
        begun.append(draft)
        return lambda: [] if may_write.wait(10) else []

    parts = [*parts_of(state), Part("slow", begin)]
    checkpoints.save(1, parts, {})
    state["n"] = 2
    assert checkpoints.saving and checkpoints.steps() == [] and checkpoints.outcomes() == []
    second = threading.Thread(target=checkpoints.save, args=(2, parts, {}))
    second.start()
    second.join(0.2)
    assert len(begun) == 1, "the second save began beside the first"
    may_write.set()
    second.join(10)
    checkpoints.wait()
    assert [outcome.step for outcome in checkpoints.outcomes()] == [1, 2]
    counters = [json.loads((tmp_path / f"global_step_{n}/counters.json").read_text()) for n in (1, 2)]
    assert counters == [{"n": 1}, {"n": 2}]


def test_a_failed_save_leaves_the_checkpoint_before_and_no_trace(tmp_path):
    checkpoints = manager(tmp_path)
    first = save(checkpoints, 1)
    broken = manager(tmp_path)

    def finish():
        raise OSError("No space left on device")

    broken.save(2, [*parts_of({"n": 1, "bytes": b"abc"}), Part("full", lambda draft: finish)], {})
    broken.wait()
    (outcome,) = broken.outcomes()
    assert outcome.error == "No space left on device"
    assert checkpoints.latest() == verify(first) and hidden(tmp_path) == []
    assert verify(save(checkpoints, 2)).step == 2


def test_a_directory_removed_while_saving_fails_the_save_and_nothing_else(tmp_path):
    checkpoints = manager(tmp_path)
    first = save(checkpoints, 1)

    def begin(draft: CheckpointFiles):
        return lambda: shutil.rmtree(draft.path) or []

    checkpoints.save(2, [*parts_of({"n": 1, "bytes": b"abc"}), Part("vandal", begin)], {})
    checkpoints.wait()
    (outcome,) = checkpoints.outcomes()
    assert outcome.error is not None and "No such file" in outcome.error
    assert checkpoints.latest() == verify(first) and checkpoints.steps() == [1]


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
        assert "lost the run directory" in checkpoints.outcomes()[0].error
        assert checkpoints.steps() == [1]
    first.release()


# ----------------------------------------------------------------------------------------------------------
# Finding


def test_latest_is_the_newest_valid_one_and_the_hint_is_not_asked(tmp_path, caplog):
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


def test_leftovers_are_cleaned_and_newer_checkpoints_set_aside_until_replaced(tmp_path, caplog):
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
    checkpoints.set_aside(after=1)
    assert checkpoints.latest().step == 1 and hidden(tmp_path) == [".aside-"]
    checkpoints.clean_up()
    assert hidden(tmp_path) == [".aside-"], "it is not replaced yet"
    save(checkpoints, 2)
    assert checkpoints.steps() == [1, 2] and hidden(tmp_path) == []


# ----------------------------------------------------------------------------------------------------------
# Retention


@given(
    steps=st.sets(st.integers(1, 60), min_size=1, max_size=20),
    newest=st.integers(-1, 5),
    every=st.sampled_from([-1, 1, 7, 10]),
    best=st.integers(0, 4),
    mode=st.sampled_from(["max", "min"]),
    data=st.data(),
)
def test_retention_keeps_what_it_says(steps, newest, every, best, mode, data):
    scores = {step: data.draw(st.none() | st.integers(0, 5)) for step in steps}
    protected = data.draw(st.sets(st.sampled_from(sorted(steps)), max_size=2))
    gone = Retention(newest, every, best, mode).disposable(scores, protected)
    kept = sorted(steps - set(gone))
    assert max(steps) in kept and protected <= set(kept)
    if newest < 0:
        assert gone == []
    else:
        assert set(sorted(steps)[-max(1, newest) :]) <= set(kept)
    assert not [step for step in gone if every > 0 and step % every == 0]
    measured = {step: score for step, score in scores.items() if score is not None}
    if best and measured and newest >= 0:
        extreme = (max if mode == "max" else min)(measured.values())
        assert extreme in [measured.get(step) for step in kept]
        ranked = sorted(measured.values(), reverse=mode == "max")[:best]
        assert sorted((measured[s] for s in kept if s in measured), reverse=mode == "max")[: len(ranked)] == ranked
    needed = len(protected) + max(1, newest) + best + sum(step % every == 0 for step in steps if every > 0)
    assert newest < 0 or len(kept) <= needed


def test_retention_spares_the_best_and_what_the_run_came_from(tmp_path):
    checkpoints = manager(tmp_path, Retention(newest=1, best=1))
    for step, score in ((1, 0.2), (2, 0.9), (3, 0.5)):
        save(checkpoints, step, score=score)
    assert checkpoints.steps() == [2, 3]
    again = manager(tmp_path, Retention(newest=1, best=1))
    again.load(again.latest(), [])
    for step, score in ((4, 0.1), (5, 0.3)):
        save(again, step, score=score)
    assert again.steps() == [2, 3, 5], "3 is what the run was resumed from"


# ----------------------------------------------------------------------------------------------------------
# Damage and malice


@pytest.fixture(scope="module")
def real_checkpoints(tmp_path_factory):
    """Two checkpoints with DCP shards, of states 1 and 2."""
    root = tmp_path_factory.mktemp("real")
    run_ranks(1, write_two, str(root))
    return root


def sharded_parts(state: dict) -> list[Part]:
    def begin(draft: CheckpointFiles):
        files = ShardedFiles(draft.path)
        tensors = {"w": state["w"].clone(), "lr": state["lr"]}
        group = dist.group.WORLD
        return lambda: [manifests.FileEntry(**e) for e in files.write("policy", tensors, {"extra.json": "{}"}, group)]

    def load(checkpoint: Checkpoint, _: Restore) -> None:
        tensors = {"w": torch.zeros(8), "lr": 0.0}
        ShardedFiles(checkpoint.path).read("policy", tensors)
        state.update(w=tensors["w"], lr=tensors["lr"])

    counter = json_part("trainer_state", lambda: {"n": state["n"]}, lambda saved: state.update(saved))
    return [counter, Part("policy", begin, load)]


def write_two(rank, root: str) -> None:
    state: dict = {}
    checkpoints, parts = manager(Path(root)), sharded_parts(state)
    for n in (1, 2):
        state.update(n=n, w=torch.arange(8.0) + n, lr=n / 10)
        save(checkpoints, n, parts)


FILES = ("manifest.json", "trainer_state.json", "policy/.metadata", "policy/__0_0.distcp", "policy/extra.json")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(FILES),
    damage=st.sampled_from(["truncate", "flip", "delete", "swap", "grow", "other_step"]),
    where=st.floats(0, 1, exclude_max=True),
    bit=st.integers(0, 7),
    other=st.sampled_from(FILES),
)
def test_a_damaged_file_is_found_and_an_older_state_restored(
    real_checkpoints, tmp_path, name, damage, where, bit, other
):
    """Whatever happens to any file of the newest checkpoint: the exact older state, or the exact newest."""
    root = tmp_path / "copy"
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(real_checkpoints, root)
    target = root / "global_step_2" / name
    content = bytearray(target.read_bytes())
    if damage == "truncate":
        target.write_bytes(content[: int(where * len(content))])
    elif damage == "flip":
        content[int(where * len(content))] ^= 1 << bit
        target.write_bytes(content)
    elif damage == "delete":
        target.unlink()
    elif damage == "swap":
        second = root / "global_step_2" / other
        target.write_bytes(second.read_bytes())
        second.write_bytes(content)
    elif damage == "grow":
        target.write_bytes(content + bytes([bit]))
    else:
        target.write_bytes((root / "global_step_1" / name).read_bytes())
    unchanged = {f: (root / "global_step_2" / f).exists() and (root / "global_step_2" / f).read_bytes() for f in FILES}
    untouched = all(unchanged[f] == (real_checkpoints / "global_step_2" / f).read_bytes() for f in FILES)
    state: dict = {}
    checkpoints = manager(root)
    n = 2 if untouched else 1
    found = checkpoints.latest()
    assert (found.path, found.step) == (str(root / f"global_step_{n}"), n)
    if not untouched:
        with pytest.raises(DamagedError) as error:
            verify(str(root / "global_step_2"))
        assert any(file in str(error.value) for file in (name, other, "manifest.json"))
    checkpoints.load(found, sharded_parts(state))
    assert state["n"] == n and state["lr"] == n / 10 and torch.equal(state["w"], torch.arange(8.0) + n)


class Malice:
    def __init__(self, path: str):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_malicious_pickle_is_refused_and_not_executed(real_checkpoints, tmp_path):
    root = tmp_path / "copy"
    shutil.copytree(real_checkpoints, root)
    executed = tmp_path / "executed"
    metadata = root / "global_step_2/policy/.metadata"
    metadata.write_bytes(pickle.dumps(Malice(str(executed))))
    tensors = {"w": torch.zeros(8), "lr": 0.0}
    with pytest.raises(UserError, match="mkdir.*not executed"):
        ShardedFiles(str(root / "global_step_2")).read("policy", tensors)
    assert not executed.exists()


def test_a_malicious_value_among_the_shards_is_not_executed(tmp_path):
    executed = tmp_path / "executed"
    run_ranks(1, write_malice, str(tmp_path), str(executed))
    tensors = {"lr": 0.0}
    with pytest.raises(UserError, match="cannot be loaded"):
        ShardedFiles(str(tmp_path)).read("policy", tensors)
    assert not executed.exists()


def write_malice(rank, directory: str, executed: str) -> None:
    ShardedFiles(directory).write("policy", {"lr": Malice(executed)}, {}, dist.group.WORLD)


def test_the_description_of_shards_leads_nowhere_else(real_checkpoints):
    with open(real_checkpoints / "global_step_2/policy/.metadata", "rb") as file:
        metadata = load_metadata(file)
    for index, info in metadata.storage_data.items():
        metadata.storage_data[index] = type(info)("../../elsewhere.distcp", info.offset, info.length)
    import io

    with pytest.raises(UserError, match="elsewhere"):
        load_metadata(io.BytesIO(pickle.dumps(metadata)))


@pytest.mark.parametrize("evil", ["../outside", "/etc/passwd", "policy/../../outside", "./x", "link"])
def test_manifest_paths_cannot_leave_the_checkpoint(tmp_path, evil):
    (tmp_path / "outside").write_bytes(b"abc")
    checkpoint = tmp_path / "global_step_1"
    checkpoint.mkdir()
    (checkpoint / "link").symlink_to(tmp_path / "outside")
    entry = manifests.FileEntry(evil, 3, "0")
    content = {"step": 1, "parts": [], "saved_at": "2026-01-01T00:00:00+00:00", "parent_step": None}
    (checkpoint / "manifest.json").write_bytes(manifests.dump(content, [entry]))
    for level in ("off", "size", "hash"):
        with pytest.raises(DamagedError, match="not inside the checkpoint"):
            verify(str(checkpoint), level)


# ----------------------------------------------------------------------------------------------------------
# The lock


def test_two_jobs_cannot_have_one_run_directory(tmp_path):
    with RunLock(str(tmp_path), 60) as first:
        assert first.acquire() is None
        with pytest.raises(UserError, match=f"in use by process {os.getpid()}"):
            RunLock(str(tmp_path), 60).acquire()
        first.check()
    with RunLock(str(tmp_path), 60) as second:
        assert second.acquire() is None


def test_the_lock_of_a_dead_process_is_taken_over_at_once(tmp_path):
    child = os.fork()
    if child == 0:
        RunLock(str(tmp_path), 60).acquire()
        os._exit(0)
    os.waitpid(child, 0)
    with RunLock(str(tmp_path), 60) as lock:
        assert f"process {child} is gone" in lock.acquire()
        lock.check()


def test_who_waits_for_a_directory_that_its_owner_removes_gets_a_new_one(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    first, second = RunLock(str(run), 60), RunLock(str(run), 60)
    first.acquire()
    taken = []
    waiting = threading.Thread(target=lambda: taken.append(second.acquire(wait=True)))
    waiting.start()
    while waiting.is_alive():  # at whatever moment the directory goes
        shutil.rmtree(run, ignore_errors=True)
        time.sleep(0.001)
    assert taken == [None]
    first.release()
    second.release()


def foreign_lock(directory: Path, **fields) -> Path:
    """The lock of a process that this machine cannot see."""
    owner = {"token": "x", "host": "elsewhere", "machine": "another", "pid": 1, "started": "1", "since": "then"}
    path = directory / ".lock"
    path.write_text(json.dumps(owner | fields))
    return path


@pytest.mark.parametrize("skew_s", [0, 3600, -3600])
def test_the_lock_of_another_machine_lives_by_its_heartbeat_whatever_its_clock_says(tmp_path, skew_s):
    path = foreign_lock(tmp_path)
    dated = time.time() + skew_s
    os.utime(path, (dated, dated))
    dead = threading.Event()

    def beat() -> None:
        while not dead.wait(0.1):
            now = time.time() + skew_s
            os.utime(path, (now, now))

    beating = threading.Thread(target=beat)
    beating.start()
    with pytest.raises(UserError, match="in use by process 1 on elsewhere"):
        RunLock(str(tmp_path), 30).acquire()
    dead.set()
    beating.join()
    with RunLock(str(tmp_path), 0.5) as lock:
        assert "took over the run directory from process 1 on elsewhere" in lock.acquire()
        lock.check()


def test_the_lock_of_a_process_whose_id_was_given_to_another_is_taken_over_at_once(tmp_path):
    with RunLock(str(tmp_path), 60) as first:
        first.acquire()
        owner = json.loads(Path(first.path).read_text())
    path = foreign_lock(tmp_path, machine=owner["machine"], pid=os.getpid(), started="1")
    with RunLock(str(tmp_path), 1e6) as lock:
        assert f"its process {os.getpid()} is gone" in lock.acquire()
        lock.check()
    assert not path.exists() and os.listdir(tmp_path) == []


def test_a_lock_that_is_torn_is_taken_over_when_nobody_renews_it(tmp_path):
    (tmp_path / ".lock").write_text("torn")
    with RunLock(str(tmp_path), 0.5) as lock:
        assert "took over" in lock.acquire()
