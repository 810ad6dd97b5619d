"""Worker groups as plain processes: their start, and that they leave no processes behind."""

from __future__ import annotations

import dataclasses
import os
import signal

import psutil
import pytest

from tests.cpu.unit.cluster.hosted import Host
from tests.support.jobs import left_running, wait_until
from trainer.cluster.fork_server import ForkServer
from trainer.cluster.process_cluster import ProcessCluster
from trainer.cluster.supervisor import is_running
from trainer.config import Config
from trainer.errors import UserError, WorkerError
from trainer.process import time_limits


def settings(**trainer) -> Config:
    return dataclasses.replace(Config(), trainer=dataclasses.replace(Config().trainer, **trainer))


@pytest.fixture(scope="module")
def fork_server_process():
    with ForkServer(["tests.cpu.unit.cluster.hosted"]) as server:
        yield server


def ended(*pids: int) -> bool:
    return not any(psutil.pid_exists(pid) and is_running(psutil.Process(pid)) for pid in pids)


def test_an_error_that_cannot_be_unpickled_keeps_its_text(fork_server_process):
    with ProcessCluster(settings(), "cpu", fork_server_process) as cluster:
        with pytest.raises(RuntimeError, match=r"^OddError: 1 and 2\n"):
            cluster.launch_ranks("rank", Host, {}).call("raise_odd_error")


def test_an_exit_of_a_worker_is_reported(fork_server_process):
    with ProcessCluster(settings(), "cpu", fork_server_process) as cluster:
        with pytest.raises(WorkerError, match="(?s)^rank 0 failed: .*SystemExit: 3"):
            cluster.launch_ranks("rank", Host, {}).call("exit")


def test_process_names_of_workers(fork_server_process):
    with ProcessCluster(settings(num_workers=2), "cpu", fork_server_process) as cluster:
        pids = cluster.launch_ranks("rank", Host, {}).call("pid")
        assert [psutil.Process(pid).name()[:6] for pid in pids] == ["rank 0", "rank 1"]


def test_release_kills_workers_and_all_processes_that_they_started(fork_server_process):
    with ProcessCluster(settings(num_workers=2), "cpu", fork_server_process) as cluster:
        group, other = (cluster.launch_ranks("rank", Host, {}) for _ in range(2))
        pids = [*group.call("pid"), *group.call("child")]
        cluster.release(group)
        assert ended(*pids)
        assert other.call("rank") == [0, 1]


def test_closing_a_cluster_leaves_no_process_and_no_file(marker):
    with ProcessCluster(settings(), "cpu") as cluster:
        group = cluster.launch_ranks("rank", Host, {})
        group.call("child")
        store = cluster.rendezvous_address(group).removeprefix("file://")
        group.start("waits")
    assert left_running(marker) == []
    assert not os.path.exists(os.path.dirname(store))


def test_the_death_of_the_fork_server_ends_the_job_with_a_message():
    with ProcessCluster(settings(), "cpu") as cluster:
        group = cluster.launch_ranks("rank", Host, {})
        pid = group.call("pid")[0]
        psutil.Process(psutil.Process(pid).ppid()).kill()
        wait_until(lambda: ended(pid))
        with pytest.raises(WorkerError, match="^the fork server of the job died, and the job with it"):
            group.call("rank")


def test_signals_to_the_driver_do_not_reach_workers():
    """Ctrl-C goes to the process group of the driver."""
    with ProcessCluster(settings(), "cpu") as cluster:
        group = cluster.launch_ranks("rank", Host, {})
        pid = group.call("pid")[0]
        assert os.getpgid(pid) != os.getpgid(0)
        os.kill(pid, signal.SIGINT)
        assert group.call("rank") == [0]


def test_ranks_and_engines_have_separate_gpus(fork_server_process, monkeypatch):
    """Only the environment decides which GPUs a process sees, so this needs no GPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    cfg = settings(num_workers=2)
    cfg = dataclasses.replace(cfg, rollout=dataclasses.replace(cfg.rollout, num_engines=1, tensor_parallel_size=2))
    with ProcessCluster(cfg, "cuda", fork_server_process) as cluster:
        ranks = cluster.launch_ranks("rank", Host, {})
        engines = cluster.launch_engines(Host, [()], {})
        assert ranks.call("environment", "CUDA_VISIBLE_DEVICES") == ["4", "5"]
        assert engines.call("environment", "CUDA_VISIBLE_DEVICES") == ["6,7"]
        cluster.release(ranks)
        assert cluster.launch_ranks("rank", Host, {}).placements()[1]["gpus"] == ["5"]


def test_engines_can_share_the_gpus_of_ranks(fork_server_process, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    cfg = settings(num_workers=2)
    cfg = dataclasses.replace(cfg, rollout=dataclasses.replace(cfg.rollout, num_engines=2, colocate=True))
    with ProcessCluster(cfg, "cuda", fork_server_process) as cluster:
        placements = cluster.launch_ranks("rank", Host, {}).placements()
        engines = cluster.launch_engines(Host, [()] * 2, {}, lambda engine: placements[1 - engine :][:1])
        assert engines.call("environment", "CUDA_VISIBLE_DEVICES") == ["5", "4"]


def test_too_few_gpus_are_refused(monkeypatch, fork_server_process):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(UserError, match="trainer.num_workers=2: .* need 3 GPUs, and there are 1"):
        ProcessCluster(settings(num_workers=2), "cuda", fork_server_process).__enter__()


def test_a_stopped_fork_server_does_not_block_the_driver(monkeypatch):
    monkeypatch.setattr(time_limits, "WORKER_EXIT_S", 0.5)
    with ProcessCluster(settings(), "cpu") as cluster:
        group = cluster.launch_ranks("rank", Host, {})
        pid = group.call("pid")[0]
        psutil.Process(psutil.Process(pid).ppid()).suspend()
        group.end(0)
        with pytest.raises(WorkerError, match="^the fork server of the job died, and the job with it"):
            group.call("rank")
        wait_until(lambda: ended(pid))
