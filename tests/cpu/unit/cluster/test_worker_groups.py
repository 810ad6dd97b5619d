"""One contract for groups, whether Ray or `LocalCluster` starts their processes."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import psutil
import pytest

from tests.cpu.unit.cluster.members import FailsToLoad, Host, LoadsAfterEngine, OpensRanks, SlowToLoad
from tests.support.jobs import wait_until
from trainer.cluster import timeouts, worker_groups
from trainer.cluster.process_cluster import LocalCluster
from trainer.cluster.ray_cluster import RayCluster
from trainer.cluster.supervisor import is_running
from trainer.cluster.worker_groups import CallFutures, WorkerGroup
from trainer.config import Config
from trainer.errors import UserError, WorkerError, origin_of


def settings() -> Config:
    """Ray gets room for two ranks and three engines: enough for the two groups that a test may have."""
    cfg = Config()
    cfg.trainer.heartbeat_timeout_s, cfg.trainer.num_workers, cfg.rollout.num_engines = 10.0, 2, 3
    return cfg


@pytest.fixture(scope="module", params=[LocalCluster, RayCluster], ids=["local", "ray"])
def cluster(request) -> Iterator[RayCluster | LocalCluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", "/tmp")  # pytest's own paths are too long for sockets
        with request.param(settings(), "cpu") as cluster:
            yield cluster


@pytest.fixture(scope="module")
def shared_group(cluster) -> Iterator[WorkerGroup]:
    """Two ranks that no test ends."""
    group = cluster.launch_ranks("rank", Host, {"WORD": "set"})
    yield group
    cluster.release(group)


@pytest.fixture
def group(cluster) -> Iterator[WorkerGroup]:
    """Two ranks of this test's own."""
    group = cluster.launch_ranks("rank", Host, {})
    yield group
    cluster.release(group)


def test_results_come_in_member_order(shared_group):
    assert len(shared_group) == 2
    assert shared_group.call("rank") == [0, 1]
    assert shared_group.call("echo", 1, b=2) == [((1,), {"b": 2})] * 2
    assert shared_group.call_one(1, "rank") == 1
    assert shared_group.call("built_with") == [(0, 2, "cpu"), (1, 2, "cpu")]
    assert shared_group.call("environment", "WORD") == ["set", "set"]


def test_a_member_gets_its_next_call_while_others_run(shared_group):
    calls, heard = CallFutures(shared_group), []
    for member in (0, 1):
        calls.begin(member, "echo", member)
    for member, ((number,), _) in calls.completed():
        heard.append((member, number))
        if number < 4:
            calls.begin(member, "echo", number + 2)
    assert sorted(heard) == [(0, 0), (0, 2), (0, 4), (1, 1), (1, 3), (1, 5)]


def test_each_engine_is_a_process_with_the_same_arguments(cluster, shared_group):
    engines = cluster.launch_engines(Host, ("a", "b"), {"WORD": "engine"})
    assert engines.call("built_with") == [("a", "b")] * 3
    assert engines.call("environment", "WORD") == ["engine"] * 3
    assert len(set(engines.call("pid"))) == 3
    cluster.release(engines)


def test_engines_start_on_the_gpus_of_ranks_that_still_import(cluster, monkeypatch, tmp_path):
    env = {"OPENED": str(tmp_path / "opened")}
    with ExitStack() as stack:
        ranks = cluster.launch_ranks("rank", LoadsAfterEngine, env)
        stack.callback(cluster.release, ranks)
        places = ranks.where()
        monkeypatch.setattr(cluster.cfg.rollout, "num_engines", 2)
        monkeypatch.setattr(cluster, "device", "cuda")
        engines = cluster.launch_engines(OpensRanks, (), env, lambda engine: places[engine : engine + 1])
        stack.callback(cluster.release, engines)
        assert ranks.call("rank") == [0, 1]
        assert engines.call("environment", "CUDA_VISIBLE_DEVICES") == ["", ""]


def test_members_get_the_value_of_a_reference(cluster, shared_group):
    batch = {"ids": np.arange(10**6), "name": "batch"}
    stored = cluster.put(batch)
    for (received,), _ in shared_group.call("echo", stored):
        np.testing.assert_array_equal(received["ids"], batch["ids"])
        assert received["name"] == "batch"


def test_members_say_where_they_are(shared_group):
    places = shared_group.where()
    assert [place["host"] for place in places] == ["127.0.0.1"] * 2
    assert len({place["node"] for place in places}) == 1
    assert [place["gpus"] for place in places] == [[], []]


def test_a_meeting_place_has_no_port(cluster, shared_group):
    address = cluster.meeting_place(shared_group)
    assert address.startswith("file:///")
    assert os.path.isdir(os.path.dirname(address.removeprefix("file://")))
    assert cluster.meeting_place(shared_group) != address


def test_an_exception_is_raised_as_itself(shared_group):
    with pytest.raises(UserError, match="^choose another$"):
        shared_group.call("raise_user_error")
    with pytest.raises(AttributeError, match="no_such_method") as raised:
        shared_group.call("no_such_method")
    (note,) = raised.value.__notes__
    assert note.startswith("in rank ") and "AttributeError: " in note


def test_the_cause_is_raised_and_not_its_echo(shared_group):
    """Rank 1 is heard first, because the connection to it has closed. Rank 0 knows the reason."""
    with pytest.raises(ValueError, match="the cause"):
        shared_group.call("fail_after_peer")


def test_a_death_is_raised_and_not_its_echo(group):
    with pytest.raises(WorkerError, match="^rank 1 died: its process was killed or crashed"):
        group.call("raise_or_die")
    with pytest.raises(WorkerError, match="^rank 1 died"):
        group.call("rank")
    assert group.call_one(0, "rank") == 0


def test_calls_aside_run_beside_other_calls(shared_group):
    waiting = shared_group.start("wait_for_open")
    shared_group.start_aside("open").result()
    assert waiting.result() == [True, True]


def test_two_threads_can_wait_for_one_member(shared_group, monkeypatch):
    """A save and the loop do."""
    monkeypatch.setattr(worker_groups, "_POLL_INTERVAL_S", 0.0)
    monkeypatch.setattr(worker_groups, "_PULSE_S", 0.0)
    calls = [shared_group.start("waits", 3.0), *(shared_group.start_aside("waits_a_little") for _ in range(3))]
    with ThreadPoolExecutor() as threads:
        assert list(threads.map(lambda call: call.result(), calls)) == [["waited"] * 2] * 4


@pytest.mark.parametrize("end", ["is_killed", "wants_a_tensor", "wants_bytes", "fills_the_gpu"])
def test_a_rank_without_memory_is_one_sentence(end, group, capfd):
    with pytest.raises(WorkerError) as raised:
        group.call(end)
    text = str(raised.value)
    assert text.startswith("rank ") and "\n" not in text, text
    assert "memory" in text and "the same command" in text
    assert capfd.readouterr() == ("", ""), "nothing else is printed"


def test_a_rank_that_cannot_load_is_named_with_its_reason(cluster):
    group = cluster.launch_ranks("bad rank", FailsToLoad, {})
    with pytest.raises((ValueError, WorkerError), match="cannot load") as raised:
        group.call("rank")
    assert "bad rank" in str(raised.value) + str(getattr(raised.value, "__notes__", ""))
    cluster.release(group)


def test_a_rank_that_does_not_start_is_named(cluster, monkeypatch, caplog):
    monkeypatch.setattr(worker_groups, "_SAY_START_S", 1.0)
    group = cluster.launch_ranks("slow rank", SlowToLoad, {})
    group.call("waits", 0.0)
    cluster.release(group)
    warnings = [record.getMessage() for record in caplog.records if "has not started" in record.getMessage()]
    assert sorted(text[:11] for text in warnings) == ["slow rank 0", "slow rank 1"]
    assert all("it counts as dead" in text for text in warnings)


def test_a_rank_that_is_stopped_while_it_starts_is_named(cluster, monkeypatch):
    """Ranks answer while they load."""
    group = cluster.launch_ranks("rank", SlowToLoad, {})
    wait_until(lambda: all(member.silence_s() >= 0 and member.at for member in group.members))
    late = next(member for member in group.members if member.starts)
    stopped = psutil.Process(late.at[0])
    stopped.suspend()
    monkeypatch.setattr(timeouts, "_IMPORTS_S", 0.0)
    group.patience = dataclasses.replace(group.patience, silence_s=4.0)
    with pytest.raises(
        WorkerError, match=rf"^{late.name} .process {stopped.pid} on .* not answered .*heartbeat_timeout_s"
    ):
        group.call("pid")
    cluster.release(group)
    assert not is_running(stopped)


def test_a_rank_that_waits_for_a_place_is_not_silent(cluster):
    if isinstance(cluster, LocalCluster):
        pytest.skip("has a place for every process")
    group = cluster._launch("rank", Host, [()], lambda rank: {"num_cpus": 1000}, {})
    time.sleep(1)
    assert group.members[0].silence_s() < 1
    group.kill()


def test_a_rank_that_stands_still_after_quick_calls_is_named(group):
    """While calls are quick, the driver has no reason to ask whether the rank still answers."""
    pid = group.call("pid")[0]
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(
            WorkerError, match=rf"rank 0 .process {pid} on .* has not answered for .*heartbeat_timeout_s"
        ):
            group.call("pid")
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_member_that_died_or_is_stopped_is_replaced(group):
    pids = group.call("pid")
    os.kill(pids[1], signal.SIGSTOP)
    group.end(1)
    assert not psutil.pid_exists(pids[1]) or not is_running(psutil.Process(pids[1]))
    group.replace(1)
    again = group.call("pid")
    assert again[0] == pids[0] and again[1] not in pids
    assert group.call("rank") == [0, 1]


def test_polling_gives_the_failure_of_one_member_and_the_results_of_the_others(group):
    calls = CallFutures(group)
    calls.begin(0, "waits_a_little")
    calls.begin(1, "is_killed")
    outcomes = {}
    while calls.is_running:
        outcomes |= {member: (result, error) for member, result, error in calls.poll()}
    assert outcomes[0] == ("waited", None)
    result, error = outcomes[1]
    assert result is None and error.cause == "killed" and origin_of(error).name == "rank 1"
    assert origin_of(error).role == "rank"


def test_a_call_hangs_after_ten_times_as_long_as_before_and_a_save_does_not():
    settings = timeouts.Patience(silence_s=10.0, call_s=1000.0, hang_s=60.0)
    known = WorkerGroup("rank", 0, lambda _: None, None, settings)
    for kind, seconds in (
        ("call quick", 1.0),
        ("call slow", 20.0),
        ("call slowest", 500.0),
        ("aside finish_save", 1.0),
    ):
        known.took(kind, seconds)
        known.took(kind, seconds / 2)
        assert known.longest_s(kind) == 1000.0, "two calls are too few to know"
        known.took(kind, seconds / 2)
    assert known.longest_s("call quick") == 60.0
    assert known.longest_s("call slow") == 200.0
    assert known.longest_s("call slowest") == 1000.0
    assert known.longest_s("aside finish_save") == 1000.0, "a save waits for the storage"
    assert known.longest_s("call new") == 1000.0
