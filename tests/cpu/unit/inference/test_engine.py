"""An engine that joins a job: who gets in, which weights it answers for, and what it hands back when it leaves."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import http.server
import json
import logging
import threading
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import httpx
import pytest

from tests.cpu.unit.generation.test_weight_shards import Ranks, some_changed
from tests.support.buckets import make_bucket, use_s3
from tests.support.generation import SAMPLED
from tests.support.jobs import left_in_shared_memory, shared_memory, wait_until
from tests.support.token_engine import TokenEngine
from tests.support.weights import make_weights
from trainer.config import RolloutConfig, compose
from trainer.errors import UserError, WorkerError
from trainer.files.shared_memory import SharedDirectory
from trainer.generation import server_protocol as protocol
from trainer.generation import weight_shards
from trainer.generation.engine import CUT, Request, SharedMemory
from trainer.generation.fleet import Fleet, JoinedEngine, Lease, Registry, check_proof
from trainer.generation.server_protocol import Job
from trainer.inference.engine import EngineGateway, EngineHost, join
from trainer.models.tiny import TinyShape, build_tiny
from trainer.models.weight_deltas import WeightsDigest
from trainer.process import time_limits
from trainer.process.model_server import TOKEN as VARIABLE
from trainer.process.network import listen, start_server

TOKEN = "the token of this test"
LEASE = Lease("one", "http://127.0.0.1:1", "vllm", "digest", 3, 8, 1.0)
JOB = Job("run", 1, "this test", owner="owner")
ROLLOUT = RolloutConfig(max_prompt_tokens=8, max_response_tokens=64)


# ----------------------------------------------------------------------------------------------------------
# The registry


@pytest.fixture
def registry(tmp_path) -> Registry:
    return Registry(str(tmp_path), TOKEN)


def test_only_leases_with_the_token_are_found(registry, tmp_path, caplog):
    registry.write(LEASE)
    assert registry.leases(0.0) == {"one": LEASE}
    with caplog.at_level(logging.WARNING):
        other = Registry(str(tmp_path), "another token of the test")
        assert other.leases(0.0) == {} == other.leases(1.0)
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}/.engines/engine-one.json: is signed with another {VARIABLE} than that of this process; "
        "it is not used"
    ]


@pytest.mark.parametrize("change", ["address", "copy", "garbage"])
def test_a_lease_that_was_changed_is_not_used(registry, tmp_path, caplog, change):
    registry.write(LEASE)
    path = tmp_path / ".engines/engine-one.json"
    content = path.read_text()
    if change == "copy":
        path.rename(path.with_name("engine-two.json"))
    else:
        path.write_text(content.replace(":1\\", ":2\\") if change == "address" else "no JSON")
        assert path.read_text() != content
    assert registry.leases(0.0) == {} and len(caplog.records) == 1


def test_a_lease_that_is_not_renewed_ends(registry, monkeypatch):
    monkeypatch.setattr(time_limits, "FLEET_LEASE_S", 10.0)
    registry.write(LEASE)
    assert registry.leases(0.0) and registry.leases(9.0)
    registry.write(replace(LEASE, time=2.0))
    assert registry.leases(15.0) and registry.leases(24.0)
    assert not registry.leases(26.0)
    registry.write(replace(LEASE, time=3.0))  # it was only slow
    assert registry.leases(27.0)


def test_a_registry_may_be_in_an_object_store(s3_url, monkeypatch):
    use_s3(monkeypatch, s3_url)
    one = Registry(f"{make_bucket('fleets')}/run", TOKEN)
    with pytest.raises(FileNotFoundError):
        one.read_job()
    one.write_job({"engine": "vllm"})
    one.write(LEASE)
    assert one.read_job() == {"engine": "vllm"} and one.leases(0.0) == {"one": LEASE}
    one.remove("one")
    assert one.leases(0.0) == {}
    one.clear()
    with pytest.raises(FileNotFoundError):
        one.read_job()


def test_what_a_job_says_needs_the_token(registry, tmp_path):
    with pytest.raises(FileNotFoundError):
        registry.read_job()
    registry.write_job({"engine": "vllm"})
    assert registry.read_job() == {"engine": "vllm"}
    with pytest.raises(UserError, match=f"signed with another {VARIABLE}"):
        Registry(str(tmp_path), "another token of the test").read_job()


# ----------------------------------------------------------------------------------------------------------
# An engine


class _Slow(TokenEngine):
    """Generates until `gate` is set."""

    gate = threading.Event()

    def step(self, requests: Any) -> Any:
        done = super().step(requests)
        self.gate.wait(30)
        return done


class Running:
    """An engine without a model, served by a thread of this process. A context manager."""

    def __init__(self, engine: type = TokenEngine, token: str = TOKEN):
        self._engine, self._token = engine, token
        self._ready, self._ended = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def __enter__(self) -> Running:
        self._thread.start()
        assert self._ready.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(30)
        assert not self._thread.is_alive()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        with listen("127.0.0.1", 0, "test") as listener:
            self.lease = replace(LEASE, address=f"http://127.0.0.1:{listener.getsockname()[1]}")
            self.host = EngineHost(functools.partial(self._engine, ""), streaming=True)
            await self.host.wait_ready()
            description = {"max_tokens": 100, "computes": "logprobs", "repeats": True}
            self.gateway = EngineGateway(self._token, self.lease, description, {"layers": 2})
            self.gateway.backend = self.host
            runner = await start_server(self.gateway.application(), listener)
            self._ready.set()
            await self._ended.wait()
            await runner.cleanup()

    def leave(self) -> None:
        asyncio.run_coroutine_threadsafe(self.host.leave(), self._loop)

    @contextlib.contextmanager
    def joined(self, job: Job = JOB, rollout: RolloutConfig = ROLLOUT) -> Iterator[JoinedEngine]:
        engine = JoinedEngine(self.lease, TOKEN, rollout=rollout, job=job)
        try:
            yield engine
        finally:
            engine.abandon()


@pytest.fixture(autouse=True)
def _token(monkeypatch):
    monkeypatch.setenv(VARIABLE, TOKEN)


@pytest.fixture
def weights() -> Iterator[SharedMemory]:
    with SharedDirectory() as shared:
        (open(f"{shared.path}/model.safetensors", "wb")).close()
        yield SharedMemory(shared.path)


REQUESTS = [Request([1, 2], seed, SAMPLED) for seed in range(5)]


def test_an_engine_answers_for_the_weights_that_it_has(weights):
    with Running() as running, running.joined() as one:
        with pytest.raises(WorkerError, match="no weights of this job"):
            one.generate(REQUESTS)
        one.sync_weights(weights, 7)
        expected = TokenEngine("")
        found = one.generate(REQUESTS)
        own = expected.step(dict(enumerate(REQUESTS)))
        while len(own) < len(REQUESTS):
            own |= expected.step({})
        assert [c.token_ids.tolist() for c in found] == [own[i].token_ids.tolist() for i in range(len(REQUESTS))]
        assert {c.weight_versions for c in found} == {(7, 7)}
        assert running.gateway.version == 7


class _Loading(TokenEngine):
    """Says which weights it has read."""

    def sync_weights(self, source: SharedMemory, version: int, running: str = "abort") -> str:
        super().sync_weights(source, version, running)
        digest = WeightsDigest()
        digest.add_files(source.path)
        return str(digest)


def test_an_engine_fetches_all_weights_once_and_then_what_has_changed(monkeypatch):
    """One that cannot reach the ranks gets the files from the job."""
    sizes: list[int] = []
    fill = weight_shards._receive_into
    monkeypatch.setattr(
        weight_shards, "_receive_into", lambda end, data: (sizes.append(memoryview(data).nbytes), fill(end, data))[1]
    )
    ranks, weights, before = Ranks("the secret of the ranks"), make_weights(1), shared_memory()
    total = sum(tensor.nbytes for tensor in weights.values())
    with Running(_Loading) as running, running.joined() as one:
        for version in (1, 2, 3, 4):
            sizes.clear()
            expected, source = WeightsDigest(), ranks.keep(weights)
            dict(expected.of(iter(weights.items())))
            if version == 4:
                monkeypatch.setattr(EngineGateway, "_fetched", _unreachable)
            assert one.sync_weights(source, version) == str(expected)
            assert sum(sizes) > total if version == 1 else sum(sizes) < 0.4 * total
            assert one._reaches_ranks == (version < 4) and running.gateway.version == version
            weights = some_changed(weights, version)
        ranks.close()
        with pytest.raises(WorkerError, match="the weights of the rank at .* have not arrived") as error:
            one.sync_weights(replace(source, offers=ranks_of_nobody(source)), 5)
        assert error.value.cause == "server", "it is asked again"
    weight_shards.close_copies()
    assert not left_in_shared_memory(before)


async def _unreachable(*_: object) -> None:
    raise WorkerError("no way there", "")


def ranks_of_nobody(source: weight_shards.Shards) -> tuple[weight_shards.RankOffer, ...]:
    return tuple(offer._replace(digest="0" * 32) for offer in source.offers)


@pytest.mark.parametrize(("asked", "is_served"), [("7", True), ("6", False), ("8", False), ("6+", True), ("8+", False)])
def test_an_engine_with_other_weights_says_no(weights, asked, is_served):
    """Exact runs ask for one version, runs in flight for it or a later one."""
    with Running() as running, running.joined() as one:
        one.sync_weights(weights, 7)
        url, headers = f"{running.lease.address}{protocol.GENERATE}", {**one._headers, protocol.VERSION: asked}
        headers |= {"Authorization": f"Bearer {TOKEN}"}
        answer = httpx.post(url, headers=headers, content=protocol.encode_requests({0: REQUESTS[0]}))
        assert (answer.status_code == 200) == is_served
        if not is_served:
            assert answer.json() == protocol.error_body(
                protocol.LOST, f"it has the weights of version 7, and this batch asks for {asked}"
            )


def test_runs_ask_for_their_weights(weights):
    """The version of the header is that of the weights, and only in flight a later one may answer."""
    for in_flight in (False, True):
        with Running() as running, running.joined(rollout=replace(ROLLOUT, in_flight_updates=in_flight)) as one:
            one.sync_weights(weights, 7)
            running.gateway.version = 8
            if in_flight:
                assert len(list(one._send({0: REQUESTS[0]}, 7))) > 1
            else:
                with pytest.raises(WorkerError, match="this batch asks for 7"):
                    list(one._send({0: REQUESTS[0]}, 7))


@pytest.mark.parametrize("in_flight", [False, True])
def test_an_engine_that_leaves_hands_back_the_tokens_that_it_has(weights, monkeypatch, in_flight):
    """Exact runs begin the requests again."""
    monkeypatch.setattr(TokenEngine, "token_s", 0.05)
    requests = {number: Request([1, 2], 63 + 64 * number, SAMPLED) for number in range(3)}
    whole = TokenEngine("")
    expected = {}
    while len(expected) < 3:
        expected |= whole.step(requests if not expected else {})
    with Running() as running, running.joined(rollout=replace(ROLLOUT, in_flight_updates=in_flight)) as one:
        one.sync_weights(weights, 7)
        threading.Timer(0.5, running.leave).start()
        if in_flight:
            parts: dict[int, Any] = {}
            while len(parts) < 3:
                parts |= one.step({} if parts else requests)
            for number, part in parts.items():
                count = len(part.token_ids)
                assert part.finish_reason == CUT and 0 < count < len(expected[number].token_ids)
                assert part.token_ids.tolist() == expected[number].token_ids[:count].tolist()
                assert part.weight_versions == (7, 7) and len(part.logprobs) == count
            requests = {9: requests[0]}
        with pytest.raises(WorkerError, match="has left") as error:
            one.step(requests)
        assert error.value.cause == protocol.LEFT


def test_an_engine_that_leaves_hands_back_what_it_has_not_finished(weights):
    _Slow.gate.clear()
    with Running(_Slow) as running, running.joined() as one:
        one.sync_weights(weights, 7)
        timer = threading.Timer(0.2, running.leave)
        timer.start()
        with pytest.raises(WorkerError, match="has left") as error:
            one.step(dict(enumerate(REQUESTS)))
        assert error.value.cause == protocol.LEFT
        with pytest.raises(WorkerError, match="has left"):
            one.step({9: REQUESTS[0]})
        _Slow.gate.set()


def test_an_engine_serves_nobody_without_the_token():
    with Running() as running:
        for path in (protocol.LEASE, protocol.GENERATE, protocol.WEIGHTS, protocol.RENEW, "/trainer/status"):
            for headers in ({}, {"Authorization": "Bearer another token"}):
                assert httpx.post(running.lease.address + path, headers=headers).status_code in (401, 404, 405)
                assert httpx.post(running.lease.address + path, headers=headers).status_code == 401
        with pytest.raises(UserError, match="serves another model: layers is 2 there, and 3 in this job"):
            with running.joined(replace(JOB, architecture={"layers": 3})):
                pass


# ----------------------------------------------------------------------------------------------------------
# What the job believes


class _Liar(http.server.BaseHTTPRequestHandler):
    """Answers everything with the `answer` of the server, and keeps what it was sent."""

    def do_GET(self) -> None:
        self.server.seen.append((self.path, dict(self.headers)))
        self.send_response(self.server.status)
        self.end_headers()
        self.wfile.write(self.server.answer)

    do_POST = do_GET

    def log_message(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("status", "answer"),
    [
        (200, b'{"proof": "00"}'),
        (200, b"<html>"),
        (404, b"{}"),
        (200, b"x" * (2 << 20)),
        (200, b'{"proof": "\\u00e4"}'),
    ],
)
def test_an_address_that_lies_gets_nothing(status, answer):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Liar) as server:
        server.seen, server.status, server.answer = [], status, answer
        threading.Thread(target=server.serve_forever, daemon=True).start()
        lease = replace(LEASE, address=f"http://127.0.0.1:{server.server_address[1]}")
        with pytest.raises(UserError, match="does not prove that it is the one of its lease"):
            JoinedEngine(lease, TOKEN, rollout=ROLLOUT, job=JOB)
        server.shutdown()
    assert len(server.seen) == 1 and server.seen[0][0].startswith(protocol.PROOF)
    assert TOKEN not in json.dumps(server.seen) and "Authorization" not in server.seen[0][1]


def test_an_engine_proves_its_own_lease_alone():
    """A lease of an engine that has ended must not lead to another one at its address."""
    with Running() as running:
        check_proof(running.lease, TOKEN)
        address = running.lease.address.replace("127.0.0.1", "localhost")
        for lease, token in [
            (replace(running.lease, id="two"), TOKEN),
            (replace(running.lease, address=address), TOKEN),
            (running.lease, "another token of the test"),
        ]:
            with pytest.raises(UserError, match="does not prove"):
                check_proof(lease, token)
    with pytest.raises(WorkerError, match="does not answer"):
        check_proof(running.lease, TOKEN)
    assert asdict(running.lease)["id"] == "one"


# ----------------------------------------------------------------------------------------------------------
# Refusals


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("model"))
    build_tiny(TinyShape(hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2, num_kv_heads=1), path)
    return path


@pytest.fixture
def fleet(tmp_path, model, monkeypatch) -> Iterator[Fleet]:
    """That of a job in `tmp_path`."""
    monkeypatch.setattr(time_limits, "FLEET_POLL_S", 0.01)
    words = (f"trainer.run_dir={tmp_path}", "rollout=transformers", "rollout.fleet=true", f"model.path={model}")
    one = Fleet(compose(words), model, "cpu")
    yield one
    one.shutdown()


def options(run: str, host: str = "127.0.0.1") -> argparse.Namespace:
    return argparse.Namespace(join=run, host=host, port=0, address=None)


def test_an_engine_that_cannot_join_is_refused_in_a_sentence(fleet, tmp_path, model, monkeypatch):
    with pytest.raises(UserError, match="no job takes engines there; start it with rollout.fleet=true first"):
        join(options(str(tmp_path / "another run")))
    build_tiny(TinyShape(hidden_size=64, intermediate_size=64, num_layers=1, num_heads=2, num_kv_heads=1), model)
    with pytest.raises(UserError, match=f"{model}: is another model than that of the job {tmp_path}"):
        join(options(str(tmp_path)))
    monkeypatch.setenv(VARIABLE, "another token of the test")
    with pytest.raises(UserError, match=f"job.json: is signed with another {VARIABLE}"):
        join(options(str(tmp_path)))
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(UserError, match=f"rollout.fleet: set the environment variable {VARIABLE} to a secret"):
        join(options(str(tmp_path)))


def test_a_job_names_an_engine_that_is_not_its_own_and_sends_it_nothing(fleet, registry, caplog):
    job = registry.read_job()
    own = replace(LEASE, kind="transformers", model=job["model"])
    registry.write(replace(own, id="kind", kind="vllm"))
    registry.write(replace(own, id="model", model="another"))
    registry.write(own)
    wait_until(lambda: fleet._present == {"one": own} and len(caplog.records) == 2)
    assert {record.getMessage() for record in caplog.records} == {
        "the engine at http://127.0.0.1:1 is rollout.engine=vllm, and this job has transformers; it gets nothing",
        "the engine at http://127.0.0.1:1 has another model than this job; it gets nothing",
    }
    fleet.shutdown()
    with pytest.raises(FileNotFoundError):
        registry.read_job()
    assert not registry.leases(0.0), "engines that were killed leave their leases to the job"
