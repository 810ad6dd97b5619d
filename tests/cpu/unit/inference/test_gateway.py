"""The front guards every route, and passes on to the engine what people may ask."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict
from types import SimpleNamespace

import httpx
import pytest
from aiohttp.test_utils import TestClient, TestServer

from tests.support.inference import ROLLOUT, TOKEN, Server, engine, job
from tests.support.jobs import command_of
from tests.support.namespaces import small_disk
from trainer.generation import server_protocol as protocol
from trainer.inference import gateway
from trainer.inference.gateway import _is_here, is_loopback

ROUTES = [
    ("GET", "/"),
    ("GET", "/health"),
    ("GET", "/v1/models"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/collective_rpc"),
    ("POST", "/pause"),
    ("POST", "/reset_prefix_cache"),
    ("POST", "/trainer/../v1/models"),
    ("GET", protocol.STATUS),
    *(("POST", path) for path in (protocol.LEASE, protocol.RENEW, protocol.RELEASE)),
    *(("POST", path) for path in (protocol.GENERATE, protocol.WEIGHTS)),
    ("PUT", f"{protocol.UPLOAD}/a.safetensors"),
    ("OPTIONS", protocol.WEIGHTS),
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize("header", [{}, {"Authorization": TOKEN}, {"Authorization": f"Bearer {TOKEN[:-1]}"}])
def test_every_route_wants_the_token(server, method, path, header):
    answer = httpx.request(method, server.url + path, headers=header)
    assert answer.status_code == 401 and answer.json() == {"error": "this server needs its token"}


@pytest.mark.parametrize("path", ["/collective_rpc", "/pause", "/reset_prefix_cache", "/trainer/alive", "/v1/load"])
def test_routes_that_change_the_engine_are_not_passed_on(server, path):
    for method in ("GET", "POST"):
        assert httpx.request(method, server.url + path, headers=server.headers, json={}).status_code == 404


def test_calls_of_a_job_need_its_lease(server):
    for path in (protocol.RENEW, protocol.GENERATE, protocol.WEIGHTS):
        answer = httpx.post(server.url + path, headers=server.headers, json={})
        assert (answer.status_code, answer.json()["kind"]) == (409, protocol.LOST)
    named = asdict(job("a", owner="1"))
    odd = ({"job": named, "needs": {"tokens": math.inf}}, {"job": named | {"architecture": 7}, "needs": {"tokens": 1}})
    for message in ({}, {"job": {}}, {"job": {"run": "a"}, "needs": {}}, [], "x", *odd):
        body = json.dumps(message)  # httpx encodes no infinity
        assert httpx.post(server.url + protocol.LEASE, headers=server.headers, content=body).status_code == 400


def test_a_job_that_loses_the_server_while_it_sends_a_request_is_refused(server, tmp_path):
    lease = {"job": asdict(job("a", 1, owner="1")), "needs": {"tokens": 1}}
    start = httpx.post(server.url + protocol.LEASE, headers=server.headers, json=lease).json()["start"]
    headers = {**server.headers, protocol.OWNER: "1", protocol.START: start}
    order = json.dumps({"path": None, "files": {}, "version": 1, "running": "abort"}).encode()

    def pieces() -> Iterator[bytes]:
        yield order[:5]
        time.sleep(0.5)  # until the server has seen the headers
        second = {**lease, "job": asdict(job("a", 2, owner="2"))}
        assert httpx.post(server.url + protocol.LEASE, headers=server.headers, json=second).status_code == 200
        yield order[5:]

    answer = httpx.post(server.url + protocol.WEIGHTS, headers=headers, content=pieces())
    assert (answer.status_code, answer.json()["kind"]) == (409, protocol.REFUSED)
    httpx.post(server.url + protocol.RELEASE, headers={**server.headers, protocol.OWNER: "2"})


def test_weights_that_do_not_fit_are_refused_before_they_are_sent(server):
    with engine(server.url) as one:
        headers = {**server.headers, **one._headers, protocol.BYTES: str(1 << 60)}
        answer = httpx.put(f"{server.url}{protocol.UPLOAD}/a.safetensors", headers=headers, content=b"")
    assert (answer.status_code, answer.json()["kind"]) == (409, protocol.REFUSED)
    assert re.fullmatch(r"has no space for the weights of this job \(1152921504607 MB, and /.* has \d+ MB free\)",
                        answer.json()["error"])  # fmt: skip


def test_a_disk_that_fills_while_weights_arrive_is_named(monkeypatch):
    async def upload(directory: str) -> tuple[int, dict[str, str]]:
        monkeypatch.setattr(gateway, "choose_directory", lambda size: directory)
        front = gateway.Gateway(None, 60.0, {"max_tokens": 1}, {})
        front.backend = SimpleNamespace(start_id="1", is_ready=True)  # type: ignore[assignment]
        async with TestClient(TestServer(front.application())) as client:
            lease = {"job": asdict(job("a", owner="1")), "needs": {"tokens": 1}}
            assert (await client.post(protocol.LEASE, json=lease)).status == 200
            headers = {protocol.OWNER: "1", protocol.START: "1"}
            answer = await client.put(f"{protocol.UPLOAD}/a.safetensors", data=bytes(3 << 20), headers=headers)
            return answer.status, await answer.json()

    with small_disk("1m") as directory:
        status, answer = asyncio.run(upload(directory))
    assert (status, answer["kind"]) == (409, protocol.REFUSED)
    assert answer["error"].startswith(f"has no space for the weights of this job in {directory}/")


@pytest.mark.parametrize(("repeats", "status"), [(True, 200), (False, 409)])
def test_a_job_that_must_repeat_is_refused_by_a_server_that_does_not(repeats, status):
    async def claim() -> tuple[int, str]:
        front = gateway.Gateway(None, 60.0, {"max_tokens": 1, "repeats": repeats}, {})
        front.backend = SimpleNamespace(start_id="1", is_ready=True)  # type: ignore[assignment]
        async with TestClient(TestServer(front.application())) as client:
            message = {"job": asdict(job("a")), "needs": {"tokens": 1, "repeats": True}}
            answer = await client.post(protocol.LEASE, json=message)
            return answer.status, (await answer.json()).get("error", "")

    found, sentence = asyncio.run(claim())
    assert found == status and ("start it with trainer.deterministic=true" in sentence) == (not repeats)


def test_jobs_and_servers_of_builds_with_the_older_name_of_the_directory_understand_each_other():
    one = job("a", 2, owner="1")
    message = one.as_message()
    assert message["place"] == message["directory"] == one.directory, "an older server reads `place`"
    for name in ("place", "directory"):
        assert gateway._job({key: value for key, value in message.items() if key != name}) == one

    async def claim() -> int:
        front = gateway.Gateway(None, 60.0, {"max_tokens": 1}, {})
        front.backend = SimpleNamespace(start_id="1", is_ready=True)  # type: ignore[assignment]
        async with TestClient(TestServer(front.application())) as client:
            older = {key: value for key, value in message.items() if key != "directory"}
            return (await client.post(protocol.LEASE, json={"job": older, "needs": {"tokens": 1}})).status

    assert asyncio.run(claim()) == 200


def test_the_token_is_in_no_command_and_no_file_of_the_server(server):
    for process in server.family():
        assert TOKEN not in command_of(process)
    assert TOKEN not in server.log.read_text()
    assert all("TRAINER_INFERENCE_TOKEN" not in process.environ() for process in server.engine())


def test_without_a_token_web_pages_are_refused(tmp_path):
    overrides = ["inference.engine=transformers", *ROLLOUT]
    with Server(tmp_path / "log", *overrides) as server:
        server.wait("starting")
        assert httpx.get(server.url + protocol.STATUS).status_code == 200
        assert httpx.get(server.url + protocol.STATUS, headers={"Origin": "http://evil"}).status_code == 403
        for name in ("evil.example", "", "::1", "127.0.0.1:99999"):
            assert httpx.get(server.url + protocol.STATUS, headers={"Host": name}).status_code == 403


def test_only_files_that_are_these_very_files_are_here(tmp_path):
    (tmp_path / "a").write_text("1")
    files = protocol.fingerprint(str(tmp_path))
    assert _is_here(str(tmp_path), files)
    assert not _is_here(str(tmp_path), {}) and not _is_here(str(tmp_path), {"a": [1, 1, 1]})
    os.symlink(tmp_path, link := tmp_path.parent / f"{tmp_path.name} link")
    assert not _is_here(str(link), files) and not _is_here(str(tmp_path / "no"), files) and not _is_here(3, files)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.1.2.3", "::1", "[::1]"])
def test_names_of_this_machine_are_known(host):
    assert is_loopback(host)
    assert not is_loopback("127.0.0.1.evil.example") and not is_loopback(socket.gethostname() + ".example")
