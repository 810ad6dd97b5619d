"""Worker groups as plain processes: how workers start and answer, and that they leave no processes behind."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys

import psutil
import pytest

from tests.cpu.unit.cluster.hosted import FailsToLoad, Host
from tests.support.jobs import left_running, wait_until
from trainer.cluster.fork_server import ForkServer, end_tree
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


@pytest.fixture
def cluster(fork_server_process):
    with ProcessCluster(settings(num_workers=2), "cpu", fork_server_process) as cluster:
        yield cluster


def ended(*pids: int) -> bool:
    return not any(psutil.pid_exists(pid) and is_running(psutil.Process(pid)) for pid in pids)


def test_a_worker_has_the_environment_directory_and_import_path_of_its_start(cluster, monkeypatch, tmp_path):
    """The fork server has started earlier."""
    monkeypatch.setenv("WORD", "of now")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    group = cluster.launch_ranks("rank", Host, {"OTHER": "own"}, 1)
    assert group.call("environment", "WORD") == ["of now"] and group.call("environment", "OTHER") == ["own"]
    (pid,) = group.call("pid")
    assert os.readlink(f"/proc/{pid}/cwd") == str(tmp_path) and group.call("import_path") == [sys.path]
    assert psutil.Process(pid).name()[:6] == "rank 0"


def test_failures_of_workers_are_raised_in_the_driver(cluster):
    group = cluster.launch_ranks("rank", Host, {}, 1)
    with pytest.raises(RuntimeError, match=r"^OddError: 1 and 2\n"):
        group.call("raise_odd_error")
    with pytest.raises(WorkerError, match="(?s)^rank 0 failed: .*SystemExit: 3"):
        group.call("exit")
    failing = cluster.launch_ranks("rank", FailsToLoad, {}, 1)
    for _ in range(2):
        with pytest.raises(ValueError, match="(?s)^cannot load\n.*ValueError: cannot load"):
            failing.call("pid")
    with pytest.raises(WorkerError, match="^rank 0 died: its process was killed or crashed"):
        group.call("is_killed")


def test_heartbeats_are_answered_during_a_call(cluster):
    group = cluster.launch_ranks("rank", Host, {}, 1)
    (pid,) = group.call("pid")
    waiting = group.start("wait_for_open")
    backend, process = group.backend, group.workers[0].process
    ticket = backend.begin(process, "heartbeat", "", (), {})
    node = {"host": "127.0.0.1", "node": "this", "gpus": []}
    assert backend.get(ticket, "rank 0") == {"pid": pid, "is_built": True, **node}
    group.start_background("open").result()
    assert waiting.result() == [True]


def test_release_kills_workers_and_all_processes_that_they_started(cluster):
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
        assert os.getpgid(pid) != os.getpgid(0), "Ctrl-C goes to the process group of the driver"
        os.kill(pid, signal.SIGINT)
        assert group.call("rank") == [0]
        psutil.Process(psutil.Process(pid).ppid()).kill()
        wait_until(lambda: ended(pid))
        with pytest.raises(WorkerError, match="^the fork server of the job died, and the job with it"):
            group.call("rank")


REFUSING = """
import errno, os

fork = os.fork

def refuse():
    os.fork = fork
    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

os.fork = refuse
"""


def test_a_process_for_which_the_system_has_no_room_has_died_and_another_can_start(tmp_path, monkeypatch, capfd):
    (tmp_path / "refusing.py").write_text(REFUSING)
    monkeypatch.syspath_prepend(tmp_path)
    with ForkServer(["refusing"]) as server, ProcessCluster(settings(), "cpu", server) as cluster:
        group = cluster.launch_ranks("rank", Host, {}, 1)
        assert group.workers[0].process._pid.result(60) is None, "nobody waits for it when the job ends"
        with pytest.raises(WorkerError, match="^rank 0 died: its process was killed or crashed"):
            group.call("rank")
        cluster.release(group)
        assert cluster.launch_ranks("rank", Host, {}, 1).call("rank") == [0]
    text = "WARNING: no process can be started (Resource temporarily unavailable): free memory, or raise `ulimit -u`"
    assert capfd.readouterr().err == f"{text}\n"


def test_a_stopped_fork_server_is_killed_with_its_workers(monkeypatch):
    monkeypatch.setattr(time_limits, "WORKER_EXIT_S", 0.5)
    with ProcessCluster(settings(), "cpu") as cluster:
        group = cluster.launch_ranks("rank", Host, {})
        pid = group.call("pid")[0]
        psutil.Process(psutil.Process(pid).ppid()).suspend()
        group.end(0)
        wait_until(lambda: ended(pid))
        group.replace(0)
        group.end(0)
        with pytest.raises(WorkerError, match="^the fork server of the job died, and the job with it"):
            group.call("rank")


def test_gpus_of_ranks_and_engines(fork_server_process, monkeypatch):
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
        placements = cluster.launch_ranks("rank", Host, {}).placements()
        assert placements[1]["gpus"] == ["5"]
        shared = cluster.launch_engines(Host, [()] * 2, {}, lambda engine: placements[1 - engine :][:1])
        assert shared.call("environment", "CUDA_VISIBLE_DEVICES") == ["5", "4"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(UserError, match="trainer.num_workers=2: .* need 4 GPUs, and there are 1"):
        ProcessCluster(cfg, "cuda", fork_server_process).__enter__()


ENDLESS = "tests.cpu.unit.cluster.endless"


def test_closing_ends_imports_that_last(tmp_path, monkeypatch):
    monkeypatch.setattr(time_limits, "PROCESS_EXIT_S", 3600)
    with ForkServer([ENDLESS], {"IMPORTING": f"{tmp_path}/begun"}) as server:
        wait_until((tmp_path / "begun").exists)
    assert not server.is_running


DRIVER = """
import os, signal, sys
from tests.cpu.unit.cluster.hosted import Host
from tests.support.inheriting_fork_server import InheritingForkServer
from trainer.cluster.fork_server import ForkServer
from trainer.cluster.process_cluster import ProcessCluster
from trainer.config import Config
with globals()[sys.argv[1]]() as server:
    with ProcessCluster(Config(), "cpu", server) as cluster:
        group = cluster.launch_ranks("rank", Host, {})
        print(os.getpgid(group.call("pid")[0]) == os.getpgid(0), group.call("child")[0], flush=True)
        group.call("waits")
"""


@pytest.mark.parametrize("kind", ["ForkServer", "InheritingForkServer"])
def test_the_death_of_the_driver_leaves_no_process(kind, marker):
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, kind], stdout=subprocess.PIPE, text=True)
    shares_process_group, child = driver.stdout.readline().split()
    assert shares_process_group == str(kind == "InheritingForkServer")
    driver.kill()
    driver.wait()
    wait_until(lambda: left_running(marker) == [] and ended(int(child)))


def test_a_killed_process_that_nobody_reaps_has_exited(monkeypatch):
    """As a worker whose fork server was killed, where the first process of a container reaps no orphans."""
    monkeypatch.setattr(time_limits, "PROCESS_EXIT_S", 10_000.0)
    careless = "import subprocess, time; print(subprocess.Popen(['sleep', '1000']).pid, flush=True); time.sleep(1000)"
    with subprocess.Popen([sys.executable, "-c", careless], stdout=subprocess.PIPE, text=True) as parent:
        try:
            child = psutil.Process(int(parent.stdout.readline()))
            end_tree(child)
            assert child.status() == psutil.STATUS_ZOMBIE
        finally:
            parent.kill()
