"""An object store behind a network that loses, delays and cuts: always the older or the newer state."""

from __future__ import annotations

import contextlib
import itertools
import random
import socket

import pytest

from tests.support.another_store import use_another_store
from tests.support.buckets import forget_connections, use_s3
from tests.support.checkpoints import parts_of, save
from tests.support.fault_proxy import CUT, ERROR, LOST, PASS, SLOW, SLOW_DOWN, fault_proxy
from tests.support.gcs import gcs_server, use_gcs
from trainer.checkpoint.buckets import ObjectStorage, client_of
from trainer.checkpoint.manager import CheckpointManager, Retention
from trainer.checkpoint.storage import StoreError, open_storage
from trainer.checkpoint.store import open_store


@pytest.fixture
def root(bucket_behind_proxy) -> str:
    """An empty prefix."""
    return f"{bucket_behind_proxy}/run"


@pytest.mark.parametrize("fault", [ERROR, SLOW_DOWN, CUT, LOST, SLOW])
def test_a_request_that_fails_is_sent_again(root, faults, fault):
    """Every third request fails: saves, retention and loads go on as if none had."""
    number = itertools.count(1)
    faults.plan = lambda method, path: fault if next(number) % 3 == 0 else PASS
    checkpoints, state = CheckpointManager(open_store(root), Retention(newest=1)), {}
    for step in (1, 2):
        state |= {"n": step, "bytes": bytes([step]) * 10}
        save(checkpoints, step, parts_of(state))
    assert checkpoints.store.steps() == [2]
    state.clear()
    checkpoints.load(checkpoints.latest(), parts_of(state))
    assert state == {"n": 2, "bytes": b"\2" * 10}
    assert {seen for _, _, seen in faults.seen} == {PASS, fault}


@pytest.mark.timeout(50)
def test_a_store_from_which_no_packet_comes_back_is_given_up_soon(monkeypatch):
    """The queue of the server is full, so it drops what arrives."""
    monkeypatch.setattr("trainer.checkpoint.buckets.MAX_ATTEMPTS", 1)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server, contextlib.ExitStack() as waiting:
        for _ in range(4):
            client = waiting.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(server.getsockname())
        use_s3(monkeypatch, f"http://127.0.0.1:{server.getsockname()[1]}")
        with pytest.raises(StoreError, match="tim(ed|eout)|error sending"):
            open_storage("s3://bucket").get("key")
    forget_connections()


def test_a_commit_whose_answer_is_lost_is_a_commit(root, faults):
    lost = itertools.count()

    def plan(method: str, path: str) -> str:
        return LOST if method == "PUT" and path.endswith("manifest.json") and next(lost) == 0 else PASS

    faults.plan = plan
    checkpoints = CheckpointManager(open_store(root))
    save(checkpoints, 1)
    assert ("PUT", LOST) in [(method, fault) for method, _, fault in faults.seen]
    assert checkpoints.latest().step == 1 and checkpoints.store.orphans() == {}


def test_a_commit_that_seems_to_fail_and_appears_later_is_the_checkpoint(root, faults):
    """Every answer to the put of the manifest is lost, and so is what would show that it was done."""
    claim = ["PUT", "GET"]  # they come before

    def plan(method: str, path: str) -> str:
        if not path.endswith("manifest.json") or method not in ("PUT", "GET"):
            return PASS
        return PASS if claim and claim.pop(0) else LOST

    faults.plan = plan
    checkpoints, state = CheckpointManager(open_store(root)), {"n": 1, "bytes": b"one"}
    checkpoints.save(1, parts_of(state), {})
    checkpoints.wait()
    (outcome,) = checkpoints.results()
    assert outcome.error is not None
    faults.plan = lambda method, path: PASS
    assert checkpoints.latest().step == 1, "its files were not deleted"
    save(checkpoints, 1, parts_of(state))  # the same process tries again
    assert checkpoints.latest().step == 1 and checkpoints.store.orphans() == {}


def test_a_store_that_does_not_answer_makes_no_checkpoint_damaged(root, faults, monkeypatch):
    """Else a resume would fall back to an older checkpoint, and train again what is safe."""
    checkpoints = CheckpointManager(open_store(root))
    for step in (1, 2):
        save(checkpoints, step)
    monkeypatch.setattr("trainer.checkpoint.buckets.MAX_ATTEMPTS", 2)
    faults.plan = lambda method, path: ERROR if "global_step_2/files" in path else PASS
    with pytest.raises(
        StoreError, match="^trainer.resume_mode=latest: .*/global_step_2: the object store fails .* move it"
    ):
        checkpoints.latest()


def test_of_two_jobs_one_gets_the_lock_and_the_other_is_told(root, faults):
    lost = itertools.count()
    faults.plan = lambda method, path: LOST if method == "PUT" and next(lost) % 2 == 0 else PASS
    store = open_store(root)
    first, second = (store.locks(2, "checkpoint directory", "end it")[0] for _ in range(2))
    assert first.acquire() is None
    with pytest.raises(ValueError, match="in use by process"):
        second.acquire()
    first.check()
    first.release()
    assert second.acquire() is None
    with pytest.raises(ValueError, match="this job lost the checkpoint directory to process"):
        first.check()
    second.release()


def test_a_lock_whose_owner_is_silent_is_taken_over_and_cannot_come_back(root, monkeypatch):
    store = open_store(root)
    silent, other = (store.locks(1, "checkpoint directory", "end it")[0] for _ in range(2))
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("trainer.checkpoint.lock.machine_name", lambda: "another machine")
        silent.acquire()
    silent._stop.set()  # as a suspended process: no heartbeat any more
    assert "no heartbeat for 1 s" in other.acquire()
    silent._renew()
    other.check()
    with pytest.raises(ValueError, match="this job lost the checkpoint directory"):
        silent.check()
    other.release()


def test_a_store_that_ignores_conditions_is_refused(root, monkeypatch):
    store, client = open_store(root), client_of("s3")
    monkeypatch.setattr(client, "put_if", lambda path, data, etag: client.put(path, data))
    with pytest.raises(OSError, match="If-None-Match"):
        store.probe()


def test_repeated_requests_to_s3_leave_the_generator_of_user_code_alone(root, faults):
    assert draws_nothing(root, faults)


def test_repeated_requests_to_google_leave_the_generator_of_user_code_alone(faults, monkeypatch):
    with gcs_server() as server, fault_proxy(server, faults) as url:
        use_gcs(monkeypatch, url)
        assert draws_nothing("gs://bucket/run", faults)


def draws_nothing(root: str, faults) -> bool:
    """Let two requests fail; return whether the generator of the module `random` is as it was before."""
    number, before = itertools.count(1), random.getstate()
    faults.plan = lambda method, path: ERROR if next(number) in (1, 3) else PASS
    save(CheckpointManager(open_store(root)), 1)
    assert ERROR in {fault for _, _, fault in faults.seen}
    return random.getstate() == before


def test_the_entry_of_a_store_names_the_modules_that_draw(monkeypatch, tmp_path):
    use_another_store(monkeypatch, tmp_path)
    before, storage = random.getstate(), ObjectStorage("mem://bucket/run")
    storage.put("a", b"1")
    assert storage.size("a") == 1 and random.getstate() == before
