"""A local disk below an object store: a real S3 server, behind a proxy that can refuse."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

import pytest

from tests.support.checkpoints import hidden, parts_of, save
from tests.support.fault_proxy import CUT, ERROR, FULL, PASS
from tests.support.namespaces import small_disk
from tests.support.runs import OpenRun, configured
from tests.support.toy import toy_config, toy_run
from trainer.checkpoint.manager import CheckpointManager, Retention
from trainer.checkpoint.manifest import verify
from trainer.checkpoint.storage import open_storage
from trainer.checkpoint.store import open_store
from trainer.checkpoint.uploads import TieredStore, open_tiers
from trainer.errors import UserError
from trainer.files.atomic_io import digest_bytes
from trainer.process import time_limits
from trainer.run.directory import RunDirectory


@pytest.fixture
def root(bucket_behind_proxy, monkeypatch) -> str:
    """An empty prefix of a store that is tried twice, and soon again."""
    monkeypatch.setattr(time_limits, "UPLOAD_FIRST_BACKOFF_S", 0.1)
    monkeypatch.setattr("trainer.checkpoint.buckets.MAX_ATTEMPTS", 2)
    return f"{bucket_behind_proxy}/run"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tmp_path_factory.mktemp("start")


def tiers(root: str, local) -> TieredStore:
    store = open_tiers(root, str(local))
    store.start_uploads(lambda: None)
    return store


def no_uploads(method: str, path: str) -> str:
    return ERROR if method in ("PUT", "POST") else PASS


def test_a_save_is_uploaded_and_a_lost_disk_costs_nothing(root, tmp_path):
    state = {"n": 7, "bytes": b"seven"}
    store = tiers(root, tmp_path / "disk")
    path = save(CheckpointManager(store), 1, parts_of(state))
    assert path == str(tmp_path / "disk" / "global_step_1"), "committed on the disk"
    store.finish_uploads(60)
    assert store.waiting() == []
    shutil.rmtree(tmp_path / "disk")
    state.clear()
    elsewhere = CheckpointManager(open_tiers(root, str(tmp_path / "another")))
    elsewhere.load(elsewhere.latest(), parts_of(state))
    assert state == {"n": 7, "bytes": b"seven"}


def test_nothing_is_deleted_before_something_newer_is_above(root, tmp_path, faults, caplog):
    store = tiers(root, tmp_path)
    checkpoints = CheckpointManager(store, Retention(newest=1))
    save(checkpoints, 1)
    wait_until_above(root, [1])
    faults.plan = no_uploads
    for step in (2, 3):
        save(checkpoints, step)
    assert checkpoints.store.steps() == [1, 2, 3], "only 1 is safe, and it is the oldest"
    assert store.waiting()
    faults.plan = lambda method, path: PASS
    store.finish_uploads(60)
    assert 3 in open_store(root).steps()
    save(checkpoints, 4)
    assert checkpoints.store.steps() == [3, 4], "4 is not uploaded: the uploads have ended"


def test_what_was_not_uploaded_is_uploaded_at_the_next_start(root, tmp_path, faults, caplog):
    faults.plan = no_uploads
    store = tiers(root, tmp_path)
    save(CheckpointManager(store), 5)
    store.finish_uploads(0)
    assert f"global_step_5 is in {tmp_path} alone, not in {root}" in caplog.text
    for thread in threading.enumerate():
        if thread.name == "uploader":  # it ends with its job otherwise
            thread.join()
    faults.plan = lambda method, path: PASS
    again = tiers(root, tmp_path)
    again.finish_uploads(60)
    assert open_store(root).steps() == [5]


def test_a_disk_that_is_full_at_any_moment_of_a_save_costs_that_save_alone(root):
    """The disk has space for none, some or all of the files of a save in two tiers."""
    state = {"n": 1, "bytes": b"x" * 500_000}
    with small_disk("3m") as disk:
        folder, ballast = Path(disk, "checkpoints"), Path(disk, "ballast")
        store = tiers(root, folder)
        checkpoints = CheckpointManager(store)
        save(checkpoints, 1, parts_of(state))
        errors = []
        for step, left in enumerate([0, 4096, 8192, 100_000, 490_000, 504_000, 508_000, 512_000, 520_000], start=2):
            ballast.write_bytes(bytes(shutil.disk_usage(disk).free - left))
            checkpoints.save(step, parts_of(state), {})
            checkpoints.wait()
            errors += [outcome.error or "" for outcome in checkpoints.results()]
            assert (step in checkpoints.store.steps()) == (not errors[-1])
            ballast.unlink()
            assert not [name for name in hidden(folder) if "writing" in name]
        assert errors[0] and not errors[-1] and all("No space left" in error for error in errors if error)
        save(checkpoints, 50, parts_of(state))
        store.finish_uploads(60)
        assert open_store(root).steps()[-1] == 50
        for step in checkpoints.store.steps():
            verify(store.path(step))


def test_an_object_store_that_is_full_holds_up_uploads_and_no_save(root, tmp_path, faults):
    faults.plan = lambda method, path: FULL if method in ("PUT", "POST") else PASS
    store = tiers(root, tmp_path / "disk")
    checkpoints = CheckpointManager(store)
    save(checkpoints, 1)
    save(checkpoints, 2)
    assert store.waiting() and open_store(root).steps() == []
    faults.plan = lambda method, path: PASS
    store.finish_uploads(60)
    assert open_store(root).steps()[-1] == 2


def test_an_object_store_that_is_full_fails_a_save_with_its_reason(root, faults):
    checkpoints = CheckpointManager(open_store(root))
    faults.plan = lambda method, path: FULL if method in ("PUT", "POST") else PASS
    checkpoints.save(1, parts_of({"n": 1, "bytes": b"abc"}), {})
    checkpoints.wait()
    (outcome,) = checkpoints.results()
    assert "minimum free drive threshold" in outcome.error
    faults.plan = lambda method, path: PASS
    save(checkpoints, 2)
    assert checkpoints.store.steps() == [2]


def test_a_store_that_is_out_of_service_does_not_stop_saves(root, tmp_path, faults, monkeypatch):
    """Meanwhile another job takes the lock of the store over: nothing is uploaded any more, and saves end soon."""
    monkeypatch.setattr(time_limits, "UPLOAD_END_S", 0.0)
    monkeypatch.setattr(time_limits, "LOCK_LEASE_S", 1.0)
    storage = open_storage(root)
    disk = {"ckpt_path": root, "ckpt_cache_dir": str(tmp_path / "disk")}
    with OpenRun(configured(tmp_path / "run", **disk), {"step": 0}) as run:
        run.save(1)
        wait_until_above(root, [1])
        faults.plan = lambda method, path: CUT
        for step in (2, 3):
            run.save(step)
        assert [outcome.error for outcome in run.directory.checkpoints.results()] == [None] * 3
        faults.plan = lambda method, path: PASS
        wait_until_above(root, [1, 2, 3])
        foreign = json.dumps({**json.loads(storage.get(".lock")), "token": "other", "host": "elsewhere"}).encode()
        faults.plan = lambda method, path: PASS if method == "PUT" and path.endswith(".lock") else CUT
        run.save(4)
        storage.put(".lock", foreign)
        run.save(5)
        checkpoints = run.directory.checkpoints
        assert [outcome.error for outcome in checkpoints.results()] == [None] * 2
        faults.plan = lambda method, path: PASS
        while not (outcome := (run.save(6), *checkpoints.results())[-1]).error:
            threading.Event().wait(0.1)
        assert f"{root}: this job lost the checkpoint directory to" in outcome.error and "elsewhere" in outcome.error
        with pytest.raises(UserError, match="lost the checkpoint directory"):
            checkpoints.store.delete(1)
    assert open_store(root).steps() == [1, 2, 3]


def test_what_is_superfluous_above_waits_for_a_store_that_is_out_of_service(root, tmp_path, faults, monkeypatch):
    monkeypatch.setattr(time_limits, "UPLOAD_END_S", 0.0)
    disk = {"ckpt_path": root, "ckpt_cache_dir": str(tmp_path / "disk")}
    with OpenRun(configured(tmp_path / "run", **disk, max_ckpts_to_keep=2), {"step": 0}) as run:
        checkpoints = run.directory.checkpoints
        for step in (1, 2):
            run.save(step)
            wait_until_above(root, [*range(1, step + 1)])
        faults.plan = lambda method, path: CUT
        for step in (3, 4):
            run.save(step)
        assert [outcome.error for outcome in checkpoints.results()] == [None] * 4
        assert checkpoints.store.steps() == [1, 2, 3, 4]
        faults.plan = lambda method, path: PASS
        wait_until_above(root, [1, 2, 3, 4])
        run.save(5)
        wait_until_above(root, [4, 5])


def test_what_was_set_aside_is_deleted_in_both_tiers_once_its_step_is_there_again(root, tmp_path):
    store = tiers(root, tmp_path / "disk")
    checkpoints = CheckpointManager(store)
    for step in (1, 2):
        save(checkpoints, step)
    wait_until_above(root, [1, 2])
    checkpoints.archive(after=1)
    assert len(store.archived()) == 2
    save(checkpoints, 2)
    store.finish_uploads(60)
    assert store.archived() == [] and open_store(root).steps() == [1, 2]


def test_a_damaged_local_copy_is_read_from_above(root, tmp_path):
    state = {"n": 1, "bytes": b"good"}
    store = tiers(root, tmp_path)
    save(CheckpointManager(store), 1, parts_of(state))
    store.finish_uploads(60)
    (tmp_path / "global_step_1" / "weights" / "shard").write_bytes(b"evil")
    checkpoints = CheckpointManager(open_tiers(root, str(tmp_path)))
    newest = checkpoints.latest()
    assert newest.path == f"{root}/global_step_1"
    checkpoints.load(newest, parts_of(state))
    assert state["bytes"] == b"good" and checkpoints.resumed_from == 1


def test_pieces_that_no_checkpoint_names_are_deleted_in_both_tiers(root, tmp_path, model):
    cfg = toy_config(tmp_path, ckpt_path=root, ckpt_cache_dir=str(tmp_path / "disk"), total_steps=1)
    toy_run(cfg, model)
    disk, above, orphan = open_store(str(tmp_path / "disk")), open_store(root), digest_bytes(b"lost")
    named = [set(tier.pieces()) for tier in (disk, above)]
    for tier in (disk, above):
        tier.keep_piece(orphan, b"lost")
    with RunDirectory(cfg).open():
        assert [set(tier.pieces()) for tier in (disk, above)] == named and named[0] == named[1] != set()


def wait_until_above(root: str, steps: list[int]) -> None:
    waiting = threading.Event()
    while open_store(root).steps() != steps:
        waiting.wait(0.1)
