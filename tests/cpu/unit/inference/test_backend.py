"""An engine that dies or hangs is started again, and nothing of it outlives the server."""

from __future__ import annotations

import contextlib
import signal

import psutil
import pytest

from tests.support.inference import ROLLOUT, Server, engine, job
from trainer.errors import WorkerError
from trainer.process import time_limits


@pytest.fixture(scope="module")
def victim(tmp_path_factory):
    log = tmp_path_factory.mktemp("victim") / "log"
    overrides = ["inference.engine=transformers", "inference.hang_timeout_s=2"]
    with Server(log, *overrides, *ROLLOUT) as server:
        yield server.wait()


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP, "reaper"])
def test_an_engine_that_dies_or_hangs_is_started_again_without_weights(victim, fault, monkeypatch):
    monkeypatch.setattr(time_limits, "SERVER_SILENCE_S", 20.0)
    victim.wait()
    with engine(victim.url, user := job()) as one:
        old = victim.engine()
        old[0 if fault == "reaper" else -1].send_signal(signal.SIGKILL if fault == "reaper" else fault)
        with engine(victim.url, user) as again:
            psutil.wait_procs(old, 30)
            with contextlib.suppress(WorkerError):  # the lease may be older than the fault
                again.set_version(-1)
        assert not any(process.is_running() and process.status() != "zombie" for process in old)
        with pytest.raises(WorkerError) as raised:
            one.set_version(1)
        assert raised.value.cause == "server"


def test_all_processes_end_with_a_server_that_is_killed(tmp_path):
    with Server(tmp_path / "log", "inference.engine=transformers") as server:
        family = server.wait().family()
        server.kill()
        assert not psutil.wait_procs(family, 20)[1]


def test_a_model_that_cannot_be_loaded_ends_the_server_with_one_sentence(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text('{"model_type": "qwen3"}')
    with Server(tmp_path / "log", "inference.engine=transformers", f"model.path={tmp_path / 'model'}") as server:
        assert server.process.wait(60) in (1, 2)
        assert "error: " in (tmp_path / "log").read_text().splitlines()[-1]
