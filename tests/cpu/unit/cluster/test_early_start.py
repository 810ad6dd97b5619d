"""What of a cluster starts before the others, and that it ends in any case."""

from __future__ import annotations

import dataclasses
import gc
import os
import signal
import sys
import threading

import pytest

from tests.cpu.unit.cluster.hosted import Host
from tests.support.jobs import left_running
from trainer.cluster.early_start import early_fork, early_ray
from trainer.cluster.fork_server import ForkServer
from trainer.cluster.process_cluster import ProcessCluster
from trainer.cluster.resources import rank_environment
from trainer.config import Config
from trainer.errors import UserError
from trainer.process.signals import SIGNALS, Stopped

HOSTED = "tests.cpu.unit.cluster.hosted"


def settings(ray_address: str | None = "processes", device: str = "cpu", engine: str = "vllm") -> Config:
    trainer = dataclasses.replace(Config().trainer, ray_address=ray_address, device=device)
    rollout = dataclasses.replace(Config().rollout, engine=engine)
    return dataclasses.replace(Config(), trainer=trainer, rollout=rollout)


@pytest.mark.parametrize("cfg", [settings("10.0.0.1:6379"), settings(device="cuda")], ids=["joins", "GPUs"])
def test_nothing_is_started_for_a_cluster_that_is_there_or_on_gpus(cfg, marker):
    """On GPUs, the imports may read which of them is the rank's."""
    with early_ray(cfg) as ray, early_fork(cfg, cfg.trainer.device, ["tests.cpu.unit.cluster.endless"]) as server:
        assert ray is None and server is None and left_running(marker) == []


@pytest.mark.parametrize("has_thread", [False, True])
def test_ranks_and_engines_that_preload_are_forks_of_the_driver(has_thread, marker, tmp_path, monkeypatch):
    """But for engines that read their variables on import, and where a thread of others may hold a lock."""
    all_threads, own = threading.enumerate, {*threading.enumerate()} - {threading.main_thread()}  # of pytest's workers
    monkeypatch.setattr(threading, "enumerate", lambda: [one for one in all_threads() if one not in own])
    sys.modules.pop("json.tool", None)
    ends, inherited = threading.Event(), (tmp_path / "file").open("w")
    os.set_inheritable(inherited.fileno(), True)
    if has_thread:
        threading.Thread(target=ends.wait).start()
    with SIGNALS.listening(), early_fork(settings(), "cpu", [HOSTED, "json.tool"]) as server:
        assert isinstance(server, ForkServer) and ("json.tool" in sys.modules) != has_thread
        ends.set()
        with ProcessCluster(settings(), "cpu", rank_server=server) as cluster:
            rank = cluster.launch_ranks("rank", Host, {"OMP_NUM_THREADS": "3"})
            assert rank.call("environment", "OMP_NUM_THREADS") == ["3"]
            assert rank.call("has_imported", "json.tool") == [True]
            assert rank.call("has_imported", "pytest") == [not has_thread]
            number = inherited.fileno() if not has_thread else 999
            assert rank.call("inherited", number) == [(False, set(), signal.SIG_DFL, 1)]
            vllm = cluster.launch_engines(Host, [()], {})
            assert vllm.call("has_imported", "json.tool") == [False]
            assert vllm.call("parent") != rank.call("parent")
            assert os.getpgid(rank.call("parent")[0]) != os.getpgid(0)
        with ProcessCluster(settings(engine="transformers"), "cpu", rank_server=server) as cluster:
            engine = cluster.launch_engines(Host, [()], {})
            assert engine.call("has_imported", "json.tool") == [True]
    assert left_running(marker) == [] and gc.get_freeze_count() == 0


@pytest.mark.processes
@pytest.mark.parametrize("address", [None, "processes"])
def test_a_job_that_is_refused_leaves_nothing_of_an_early_start(address, marker, monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", "/tmp")  # the paths of tests are too long for sockets
    cfg = settings(address)
    with pytest.raises(UserError), early_ray(cfg) as ray, early_fork(cfg, "cpu", [HOSTED]) as server:
        assert (ray is None, server is None) == (address is not None, address is None)
        raise UserError("data.train_files: no such file")
    assert left_running(marker) == []
    assert ray is None or not os.path.exists(ray.directory)


@pytest.mark.processes
def test_a_signal_during_an_early_start_ends_what_was_started(marker, monkeypatch):
    def signalled(*arguments):
        signal.raise_signal(signal.SIGTERM)
        return environment(*arguments)

    environment = rank_environment
    monkeypatch.setattr("trainer.cluster.early_start.rank_environment", signalled)
    with SIGNALS.listening(), pytest.raises(Stopped), early_fork(settings(), "cpu", [HOSTED]):
        raise AssertionError("the block ran")
    assert left_running(marker) == []
