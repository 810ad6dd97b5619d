"""What of a cluster starts before the driver imports torch, and that it ends in any case."""

from __future__ import annotations

import dataclasses
import os
import signal

import pytest

from tests.cpu.unit.cluster.hosted import Host
from tests.support.jobs import left_running
from trainer.cluster.early_start import early_start
from trainer.cluster.fork_server import ForkServer
from trainer.cluster.process_cluster import ProcessCluster
from trainer.cluster.ray_head import RayHead
from trainer.cluster.resources import rank_environment
from trainer.config import Config
from trainer.errors import UserError
from trainer.process.signals import SIGNALS, Stopped

HOSTED = "tests.cpu.unit.cluster.hosted"


def settings(ray_address: str | None = "processes", device: str = "cpu") -> Config:
    trainer = dataclasses.replace(Config().trainer, ray_address=ray_address, device=device)
    return dataclasses.replace(Config(), trainer=trainer)


@pytest.mark.parametrize("cfg", [settings("10.0.0.1:6379"), settings(device="cuda")], ids=["joins", "GPUs"])
def test_nothing_is_started_for_a_cluster_that_is_there_or_on_gpus(cfg, marker):
    """On GPUs, the imports may read which of them is the rank's."""
    with early_start(cfg, ["tests.cpu.unit.cluster.endless"]) as early:
        assert early is None and left_running(marker) == []


def test_ranks_are_forked_where_their_modules_are_imported_and_engines_are_not(marker):
    cfg = settings()
    with early_start(cfg, [HOSTED, "json.tool"]) as early:
        assert isinstance(early, ForkServer)
        with ProcessCluster(cfg, "cpu", rank_server=early) as cluster:
            rank = cluster.launch_ranks("rank", Host, {"OMP_NUM_THREADS": "3"})
            assert rank.call("environment", "OMP_NUM_THREADS") == ["3"]
            assert rank.call("has_imported", "json.tool") == [True]
            engine = cluster.launch_engines(Host, [()], {})
            assert engine.call("has_imported", "json.tool") == [False]
            assert engine.call("parent") != rank.call("parent")
    assert left_running(marker) == []


@pytest.mark.parametrize("address, kind", [(None, RayHead), ("processes", ForkServer)])
def test_a_job_that_is_refused_leaves_nothing_of_an_early_start(address, kind, marker, monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", "/tmp")  # the paths of tests are too long for sockets
    with pytest.raises(UserError), early_start(settings(address), [HOSTED]) as early:
        assert isinstance(early, kind)
        raise UserError("data.train_files: no such file")
    assert left_running(marker) == []
    assert not (isinstance(early, RayHead) and os.path.exists(early.directory))


@pytest.mark.processes
def test_a_signal_during_an_early_start_ends_what_was_started(marker, monkeypatch):
    def signalled(*arguments):
        signal.raise_signal(signal.SIGTERM)
        return environment(*arguments)

    environment = rank_environment
    monkeypatch.setattr("trainer.cluster.early_start.rank_environment", signalled)
    with SIGNALS.listening(), pytest.raises(Stopped), early_start(settings(), [HOSTED]):
        raise AssertionError("the block ran")
    assert left_running(marker) == []
