"""An engine that dies or hangs is started again, and nothing of it outlives the server."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from tests.support.generation import make_requests
from tests.support.inference import ROLLOUT, Server, engine, job
from tests.support.jobs import command_of, wait_until
from trainer.cluster.supervisor import is_running
from trainer.config import TinyConfig
from trainer.errors import UserError, WorkerError
from trainer.generation import server_protocol as protocol
from trainer.generation.weight_sync import SharedMemory
from trainer.inference.backend import _directory_for_sockets, _environment
from trainer.models.tiny import build_tiny
from trainer.process import time_limits

VICTIM = ("inference.engine=transformers", "inference.hang_timeout_s=5", *ROLLOUT)


@pytest.fixture(scope="module")
def victim(tmp_path_factory):
    log = tmp_path_factory.mktemp("victim") / "log"
    with Server(log, *VICTIM) as server:
        yield server.wait()


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP, "reaper"])
def test_an_engine_that_dies_or_hangs_is_started_again_without_weights(victim, fault, monkeypatch):
    monkeypatch.setattr(time_limits, "SERVER_SILENCE_S", 20.0)
    victim.wait()
    children = psutil.Process(victim.process.pid).children()
    watching = next(child for child in children if "signal_watch" in command_of(child))
    with engine(victim.url, user := job()) as one:
        old = victim.engine()
        old[0 if fault == "reaper" else -1].send_signal(signal.SIGKILL if fault == "reaper" else fault)
        with engine(victim.url, user) as again:
            psutil.wait_procs(old, 30)  # a zombie stays as long
            with contextlib.suppress(WorkerError):  # the lease may be older than the fault
                again.set_version(-1)
        wait_until(lambda: not any(map(is_running, old)))
        with pytest.raises(WorkerError) as raised:
            one.set_version(1)
        assert raised.value.cause == "server"
    assert is_running(watching), "no process of the server but its engine is ended"


def test_a_load_of_weights_may_take_longer_than_other_work(tmp_path):
    """The first one may. When it is known how long a load takes, another one hangs after a similar time."""
    build_tiny(TinyConfig(), str(weights := tmp_path / "weights"))
    os.mkfifo(pipe := tmp_path / "model.safetensors")
    with Server(tmp_path / "log", *VICTIM) as server, ThreadPoolExecutor(1) as pool:
        with engine(server.wait().url) as one:
            start = one._lease["start"]
            load = pool.submit(one.sync_weights, SharedMemory(str(tmp_path)), 1)
            time.sleep(10)  # inference.hang_timeout_s is 5, and the engine is looked at every 2 s
            os.close(os.open(pipe, os.O_WRONLY))
            with pytest.raises(UserError, match="cannot read the weights of this job"):
                load.result()
        with engine(server.url, one._job) as again:
            assert again._lease["start"] == start
            again.sync_weights(SharedMemory(str(weights)), 1)
            with pytest.raises(WorkerError, match="has failed while it loaded weights"):
                pool.submit(again.sync_weights, SharedMemory(str(tmp_path)), 2).result(120)
        with engine(server.wait().url, one._job) as another:
            assert another._lease["start"] != start
        assert "the engine makes no progress while it loads weights" in server.log.read_text()


def test_an_engine_that_hangs_before_a_load_of_weights_is_started_again_soon(victim, tmp_path):
    """Not after `inference.start_timeout_s`, within which a load must end."""
    victim.wait()
    build_tiny(TinyConfig(), str(tmp_path))
    old = victim.engine()
    with ThreadPoolExecutor(1) as pool, engine(victim.url) as one:
        old[-1].suspend()
        load = pool.submit(one.sync_weights, SharedMemory(str(tmp_path)), 1)
        try:
            with pytest.raises(WorkerError, match="does not serve"):
                load.result(60)
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                old[-1].resume()
    wait_until(lambda: not any(map(is_running, old)))


def test_an_answer_that_breaks_off_is_followed_by_no_other(victim, tmp_path):
    victim.wait()
    build_tiny(TinyConfig(), str(tmp_path))
    sampling = dataclasses.replace(make_requests(1)[0].sampling, max_tokens=64)
    requests = [dataclasses.replace(request, sampling=sampling) for request in make_requests(64)]
    with engine(victim.url) as one:
        one.sync_weights(SharedMemory(str(tmp_path)), 1)
        body = protocol.encode_requests(dict(enumerate(requests)))
        headers = {**one._headers, "Host": "localhost", "Content-Length": str(len(body)), "Connection": "close"}
        lines = [f"POST {protocol.GENERATE} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        with socket.create_connection(("127.0.0.1", victim.port)) as connection:
            connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)
            answer = connection.recv(1 << 20)
            victim.engine()[-1].kill()
            with contextlib.suppress(ConnectionError):
                while piece := connection.recv(1 << 20):
                    answer += piece
    assert answer.startswith(b"HTTP/1.1 200") and answer.count(b"HTTP/1.1") == 1


def test_a_job_that_computes_takes_its_server_again_after_a_restart(victim):
    """Its server has been started again meanwhile."""
    victim.wait()
    with engine(victim.url, user := job("a")) as one:
        victim.kill()
        victim.start()
        victim.wait()
        wait_until(lambda: victim.status()["job"] == user.name)
        with pytest.raises(UserError, match="is in use by run a 1"):
            with engine(victim.url, job("b")):
                pass
        with pytest.raises(WorkerError) as raised:
            one.set_version(1)
        assert raised.value.cause == "server", "the weights are lost"


def test_the_processes_of_an_engine_reach_each_other_on_this_machine_alone(monkeypatch):
    for name in ("GLOO_SOCKET_IFNAME", "VLLM_HOST_IP", "VLLM_RPC_BASE_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "chosen")
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    found = _environment("/tmp/private")
    assert (found["GLOO_SOCKET_IFNAME"], found["NCCL_SOCKET_IFNAME"]) == ("lo", "chosen")
    assert (found["VLLM_HOST_IP"], found["VLLM_RPC_BASE_PATH"]) == ("127.0.0.1", "/tmp/private")
    assert "VLLM_API_KEY" not in found and "VLLM_RPC_BASE_PATH" not in _environment("/tmp/" + "x" * 70)


def test_a_directory_with_a_long_path_holds_no_sockets(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/var/tmp")
    assert _directory_for_sockets() == "/var/tmp"
    monkeypatch.setattr(tempfile, "tempdir", "/var/tmp/" + "x" * 80)
    assert _directory_for_sockets() == "/tmp"


def test_all_processes_end_with_a_server_that_is_killed(tmp_path):
    with Server(tmp_path / "log", "inference.engine=transformers") as server:
        family = server.wait().family()
        server.kill()
        assert not psutil.wait_procs(family, 120)[1]


def test_a_model_that_cannot_be_loaded_ends_the_server_with_one_sentence(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text('{"model_type": "qwen3"}')
    with Server(tmp_path / "log", "inference.engine=transformers", f"model.path={tmp_path / 'model'}") as server:
        assert server.process.wait(300) in (1, 2)
        assert "error: " in (tmp_path / "log").read_text().splitlines()[-1]
