"""Worker groups behave alike, whether Ray or `ProcessCluster` starts their processes."""

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

from tests.cpu.unit.cluster.conftest import settings
from tests.cpu.unit.cluster.hosted import FailsToLoad, Host, LoadsAfterEngine, OpensRanks, SlowToLoad
from tests.support.jobs import wait_until
from trainer.cluster.process_cluster import ProcessCluster
from trainer.cluster.ray_cluster import RayCluster
from trainer.cluster.supervisor import is_running
from trainer.cluster.worker_groups import CallFutures, Timeouts, WorkerGroup
from trainer.errors import UserError, WorkerError, failure_source_of
from trainer.process import time_limits
from trainer.process.tracing import TRACER


@pytest.fixture(scope="module", params=["process", "ray"])
def cluster(request) -> Iterator[RayCluster | ProcessCluster]:
    if request.param == "ray":
        yield request.getfixturevalue("ray_cluster")
        return
    with ProcessCluster(settings(), "cpu") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def shared_group(cluster) -> Iterator[WorkerGroup]:
    """Two ranks that no test ends."""
    group = cluster.launch_ranks("rank", Host, {"WORD": "set"})
    yield group
    cluster.release(group)


def test_results_are_in_the_order_of_the_workers(cluster, shared_group):
    assert len(shared_group) == 2
    assert shared_group.call("rank") == [0, 1]
    assert shared_group.call("echo", 1, b=2) == [((1,), {"b": 2})] * 2
    assert shared_group.call_one(1, "rank") == 1
    assert shared_group.call("built_with") == [(0, 2, "cpu"), (1, 2, "cpu")]
    assert shared_group.call("environment", "WORD") == ["set", "set"]
    placements = shared_group.placements()
    assert [placement["host"] for placement in placements] == ["127.0.0.1"] * 2
    assert len({placement["node"] for placement in placements}) == 1
    assert [placement["gpus"] for placement in placements] == [[], []]
    address = cluster.rendezvous_address(shared_group)
    assert os.path.isdir(os.path.dirname(address.removeprefix("file://")))
    assert cluster.rendezvous_address(shared_group) != address
    batch = {"ids": np.arange(10**6), "name": "batch"}
    for (received,), _ in shared_group.call("echo", cluster.put(batch)):
        np.testing.assert_array_equal(received["ids"], batch["ids"])
        assert received["name"] == "batch"
    engines = cluster.launch_engines(Host, [("a", i) for i in range(2)], {"WORD": "engine"})
    assert engines.call("built_with") == [("a", 0), ("a", 1)]
    assert engines.call("environment", "WORD") == ["engine"] * 2
    assert len(set(engines.call("pid"))) == 2
    cluster.release(engines)


def test_calls_bring_the_spans_of_their_workers(shared_group, monkeypatch):
    monkeypatch.setattr(TRACER, "is_on", True)
    began = time.monotonic()
    assert shared_group.call("echo", 1, b=2) == [((1,), {"b": 2})] * 2
    assert shared_group.start_background("rank", workers=[1]).result() == [1]
    with pytest.raises(UserError, match="choose another"):
        shared_group.call_one(0, "raise_user_error")
    monkeypatch.setattr(TRACER, "is_on", False)
    spans = TRACER.take()
    assert {span[:3] for span in spans} == {
        *(("rank 0", "main", "echo"), ("rank 1", "main", "echo"), ("rank 1", "background", "rank")),
    }
    assert all(began <= span.start <= span.end <= time.monotonic() for span in spans)
    assert shared_group.call("rank") == [0, 1] and TRACER.take() == []


def test_a_worker_can_start_its_next_call_while_others_run(shared_group):
    calls, results = CallFutures(shared_group), []
    for worker in (0, 1):
        calls.begin(worker, "echo", worker)
    for worker, ((number,), _) in calls.completed():
        results.append((worker, number))
        if number < 4:
            calls.begin(worker, "echo", number + 2)
    assert sorted(results) == [(0, 0), (0, 2), (0, 4), (1, 1), (1, 3), (1, 5)]


def test_engines_start_on_the_gpus_of_ranks_that_still_import(cluster, monkeypatch, tmp_path):
    env = {"OPENED": str(tmp_path / "opened")}
    with ExitStack() as stack:
        ranks = cluster.launch_ranks("rank", LoadsAfterEngine, env, 1)
        stack.callback(cluster.release, ranks)
        placements = ranks.placements()
        monkeypatch.setattr(cluster, "device", "cuda")
        engines = cluster.launch_engines(OpensRanks, [()], env, lambda engine: placements)
        stack.callback(cluster.release, engines)
        assert ranks.call("rank") == [0]
        assert engines.call("environment", "CUDA_VISIBLE_DEVICES") == [""]


def test_an_exception_of_a_worker_is_raised_unchanged(shared_group):
    with pytest.raises(UserError, match="^choose another$"):
        shared_group.call("raise_user_error")
    with pytest.raises(AttributeError, match="no_such_method") as raised:
        shared_group.call("no_such_method")
    (note,) = raised.value.__notes__
    assert note.startswith("in rank ") and "AttributeError: " in note
    # The error of rank 1 arrives first, because its connection has closed. Rank 0 reports the cause.
    with pytest.raises(ValueError, match="the cause"):
        shared_group.call("fail_after_peer")


def test_two_threads_can_wait_for_one_worker(shared_group, monkeypatch):
    """The saving thread and the training loop do this."""
    monkeypatch.setattr(time_limits, "POLL_INTERVAL_S", 0.0)
    monkeypatch.setattr(time_limits, "HEARTBEAT_INTERVAL_S", 0.0)
    calls = [shared_group.start("waits", 3.0), *(shared_group.start_background("waits_a_little") for _ in range(3))]
    with ThreadPoolExecutor() as threads:
        assert list(threads.map(lambda call: call.result(), calls)) == [["waited"] * 2] * 4
    waiting = shared_group.start("wait_for_open")
    shared_group.start_background("open").result()
    assert waiting.result() == [True, True]


def test_failures_of_workers_are_named_and_workers_are_replaced(cluster, capfd):
    """Two ranks die, hang and lack memory, one after another."""
    group = cluster.launch_ranks("rank", Host, {})
    pids = group.call("pid")
    with pytest.raises(WorkerError, match="^rank 1 died: its process was killed or crashed") as died:
        group.call("raise_or_die")  # and not what rank 0 has raised for it
    with pytest.raises(WorkerError, match="^rank 1 died"):
        group.call("rank")
    assert group.call_one(0, "rank") == 0

    # While calls are fast, the driver does not check heartbeats.
    given, group.timeouts = group.timeouts, dataclasses.replace(group.timeouts, heartbeat_s=5.0)
    os.kill(pids[0], signal.SIGSTOP)
    with pytest.raises(WorkerError, match=rf"rank 0 .process {pids[0]} on .* has not answered for"):
        group.call_one(0, "pid")

    group.timeouts = given
    for rank in (0, 1):
        group.end(rank)
        assert not psutil.pid_exists(pids[rank]) or not is_running(psutil.Process(pids[rank]))
        group.replace(rank)
    assert not set(group.call("pid")) & set(pids) and group.call("rank") == [0, 1]

    # All kinds of workers tell torch's errors from others in one way.
    of_torch = ["wants_a_tensor", "fills_the_gpu"] if isinstance(cluster, ProcessCluster) else []
    capfd.readouterr()
    said = [str(died.value)]
    for end in (*of_torch, "wants_bytes"):
        with pytest.raises(WorkerError) as lacks:
            group.call_one(0, end)
        said.append(str(lacks.value))
    assert capfd.readouterr() == ("", ""), "nothing else is printed"
    for text in said:
        assert text.startswith("rank ") and "\n" not in text, text
        assert "memory" in text and "the same command" in text

    calls = CallFutures(group)
    calls.begin(0, "waits_a_little")
    calls.begin(1, "is_killed")
    outcomes = {}
    while calls.is_running:
        outcomes |= {worker: (result, error) for worker, result, error in calls.poll()}
    assert outcomes[0] == ("waited", None)
    result, error = outcomes[1]
    assert result is None and error.cause == "killed" and failure_source_of(error).name == "rank 1"
    assert failure_source_of(error).role == "rank"
    cluster.release(group)


def test_a_rank_that_cannot_load_is_named_with_its_reason(cluster):
    group = cluster.launch_ranks("bad rank", FailsToLoad, {}, 1)
    with pytest.raises((ValueError, WorkerError), match="cannot load") as raised:
        group.call("rank")
    assert "bad rank" in str(raised.value) + str(getattr(raised.value, "__notes__", ""))
    cluster.release(group)


def test_a_rank_that_is_stopped_while_it_starts_is_named(cluster, monkeypatch):
    """Ranks answer while they load."""
    group = cluster.launch_ranks("rank", SlowToLoad, {}, 1)
    wait_until(lambda: all(worker.heartbeat_age_s() >= 0 and worker.process_id for worker in group.workers))
    (late,) = group.workers
    assert late.is_starting
    stopped = psutil.Process(late.process_id[0])
    stopped.suspend()
    monkeypatch.setattr(time_limits, "IMPORTS_S", 0.0)
    group.timeouts = dataclasses.replace(group.timeouts, heartbeat_s=4.0)
    with pytest.raises(WorkerError, match=rf"^{late.name} .process {stopped.pid} on .* not answered"):
        group.call("pid")
    cluster.release(group)
    assert not is_running(stopped)


def test_a_rank_that_is_not_scheduled_yet_misses_no_heartbeats(ray_cluster):
    group = ray_cluster._launch("rank", Host, [()], lambda rank: {"num_cpus": 1000}, {}, [])
    time.sleep(1)
    assert group.workers[0].heartbeat_age_s() < 1
    ray_cluster.release(group)


def test_imports_of_a_starting_process_may_keep_it_from_answering():
    limit = time_limits.IMPORTS_S
    for heartbeat_s in (1.0, limit + 1):
        timeouts = Timeouts(heartbeat_s, 1.0)
        assert timeouts.heartbeat_limit_s(is_starting=False) == heartbeat_s
        assert timeouts.heartbeat_limit_s(is_starting=True) == max(heartbeat_s, limit)


def test_a_process_of_the_cluster_that_died_ends_the_job_with_its_name():
    Timeouts(1.0, 1.0).check_cluster()
    with pytest.raises(WorkerError, match="^raylet died, and the job with it") as raised:
        Timeouts(1.0, 1.0, lambda: "raylet").check_cluster()
    assert raised.value.cause == "cluster" and "restart it with the same command" in str(raised.value)
