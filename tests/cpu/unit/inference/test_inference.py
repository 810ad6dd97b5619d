"""An inference server and its job: the same bits as an engine of the job, one owner, and a sentence for each refusal.

All tests share one server of vLLM. Those at the end of the file kill its processes.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from safetensors.torch import load_file, save_file

from tests.support.engines import start_vllm, vllm_launcher
from tests.support.fault_proxy import CUT, PASS, Faults, fault_proxy
from tests.support.generation import GREEDY, ROLLOUT, contents, make_requests, with_sampling
from tests.support.inference import ROLLOUT as WORDS
from tests.support.inference import TOKEN, Server, answering, engine, free_port, job
from tests.support.jobs import command_of, comparable, metrics, run_forked_job, start_forked_job, wait_until
from trainer.cluster.process_cluster import ProcessCluster
from trainer.config import Config, compose
from trainer.errors import UserError, WorkerError
from trainer.files.shared_memory import SharedDirectory
from trainer.generation import server_engine
from trainer.generation import server_protocol as protocol
from trainer.generation.engine import Completion
from trainer.generation.weight_sync import SharedMemory
from trainer.inference.backend import _environment, _mapped_segments
from trainer.inference.gateway import Lease, RefusedError, _is_here, is_loopback
from trainer.inference.server import check, listen
from trainer.inference.vllm_server import arguments, write_chat_template, write_generation_config
from trainer.models.tiny import TinyShape, build_tiny
from trainer.models.weight_deltas import WeightsDigest
from trainer.process import time_limits
from trainer.process.model_server import STATUS
from trainer.process.model_server import TOKEN as VARIABLE

pytestmark = pytest.mark.early
REQUESTS = [*make_requests(6, longest=200), *with_sampling(make_requests(2), GREEDY)]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("model"))
    # So wide that vLLM on CPU computes a batch of one token with other kernels.
    shape = TinyShape(hidden_size=768, intermediate_size=2304, num_layers=1, num_heads=12, num_kv_heads=6, seed=5)
    build_tiny(shape, path)
    tensors = {
        name: tensor * 3 if tensor.dim() > 1 else tensor
        for name, tensor in load_file(f"{path}/model.safetensors").items()
    }
    # Many files hold the tied head once more. vLLM unties it, and ties it again when it has found the two equal.
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, f"{path}/model.safetensors", {"format": "pt"})
    return path


@pytest.fixture(scope="module")
def weights(model) -> Iterator[SharedMemory]:
    """The model's weights, changed a little."""
    with SharedDirectory() as shared:
        tensors = load_file(f"{model}/model.safetensors")
        del tensors["lm_head.weight"]  # the ranks send it once
        save_file({name: tensor * 1.1 for name, tensor in tensors.items()}, f"{shared.path}/model.safetensors")
        yield SharedMemory(shared.path)


@pytest.fixture(scope="module")
def expected(model, weights) -> list[tuple]:
    """What an engine of the job generates with these weights."""
    with vllm_launcher() as launcher, ProcessCluster(Config(), "cpu", launcher) as cluster:
        own = start_vllm(cluster, model)
        own.sync_weights(weights, 3)
        return contents(own.generate(REQUESTS))


@pytest.fixture(scope="module")
def running_server(model, tmp_path_factory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log"
    words = (f"model.path={model}",)
    with Server(log, *words, *WORDS, token=TOKEN, limits="SERVER_LEASE_S=5 SERVER_HANG_S=20") as server:
        yield server.wait()


@pytest.fixture
def server(running_server, monkeypatch) -> Server:
    """The server, whose token the test's process has."""
    monkeypatch.setenv(VARIABLE, TOKEN)
    return running_server


class Broadcast:
    """Sends weights as ranks on several nodes do."""

    total_bytes = 1 << 20

    def __init__(self, path: str):
        self._path = path

    def receive(self) -> Iterator:
        yield from load_file(f"{self._path}/model.safetensors").items()


def test_completions_are_those_of_an_engine_of_the_job_to_the_last_bit(server, model, weights, expected):
    with engine(server.url) as one:
        with pytest.raises(WorkerError, match="no weights of this job"):
            one.generate(REQUESTS[:1])
        digest = WeightsDigest()
        digest.add_files(weights.path)
        assert one.sync_weights(weights, 3) == str(digest)
        assert contents(one.generate(REQUESTS)) == expected
        assert contents(one.generate(REQUESTS[::-1]))[::-1] == expected
        assert contents([one.generate([request])[0] for request in REQUESTS[:2]]) == expected[:2]
        assert one.sync_weights(SharedMemory(model), 4) != str(digest)
        other = one.generate(REQUESTS)
        assert {c.weight_versions for c in other} == {(4, 4)} and contents(other) != expected
        assert one.sync_weights(Broadcast(weights.path), 3) == str(digest)
        assert contents(one.generate(REQUESTS)) == expected
    ports = [c for one in server.engine() for c in one.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    assert all(ipaddress.ip_address(port.laddr.ip).is_loopback for port in ports)


def test_weights_travel_over_http_to_a_server_that_does_not_see_the_files(server, weights, expected, monkeypatch):
    monkeypatch.setattr(protocol, "fingerprint", lambda directory: {"other machine": [1, 2, 3]})
    with engine(server.url) as one:
        one.sync_weights(weights, 3)
        assert contents(one.generate(REQUESTS)) == expected
        headers = {**server.headers, **one._headers, protocol.BYTES: str(1 << 60)}
        answer = httpx.put(f"{server.url}{protocol.UPLOAD}/a.safetensors", headers=headers, content=b"")
    assert answer.status_code == 409 and answer.json()["error"].startswith("has no space for the weights of this job")


def test_weights_of_another_model_and_files_that_are_none_are_refused_and_the_engine_lives(server, weights, expected):
    tensors = load_file(f"{weights.path}/model.safetensors")
    with engine(server.url) as one, SharedDirectory() as shared:
        path, name = Path(shared.path, "model.safetensors"), "model.norm.weight"
        save_file({**tensors, name: tensors[name][:-1].clone()}, path)
        with pytest.raises(UserError, match=f"{server.url} serves another model: {name} has the shape"):
            one.sync_weights(SharedMemory(shared.path), 4)
        path.write_bytes(b"no weights")
        with pytest.raises(UserError, match=r"cannot read the weights of this job \(model.safetensors: "):
            one.sync_weights(SharedMemory(shared.path), 4)
        one.sync_weights(weights, 3)
        assert contents(one.generate(REQUESTS)) == expected
    architecture = {"rope_parameters.rope_theta": 1.0}
    with pytest.raises(UserError, match="serves another model: rope_parameters.rope_theta is"):
        with engine(server.url, dataclasses.replace(job(), architecture=architecture)):
            pass
    with pytest.raises(UserError, match="takes 364 tokens, prompt and completion together, and this job needs 400"):
        with engine(server.url, max_prompt_tokens=336):
            pass


def test_one_job_uses_a_server(server, weights, monkeypatch):
    with engine(server.url, job("a", 1)) as first:
        first.sync_weights(weights, 3)
        with pytest.raises(UserError, match="is in use by run a 1; choose another server, or end that job and wait"):
            with engine(server.url, job("b", 1)):
                pass
        with engine(server.url, job("a", 2)) as second:
            with pytest.raises(UserError, match="has been taken by run a 2: this job has lost it"):
                first.sync_weights(weights, 4)
            with pytest.raises(UserError, match=r"has been taken by a newer start of this run \(start 2\)"):
                with engine(server.url, job("a", 1)):
                    pass
            second._ended.set()  # as if its process were stopped: its lease of 5 seconds ends, and the next job waits
            with engine(server.url, job("b")), pytest.raises(UserError, match="this job has lost it"):
                second.set_version(1)
    assert server.status()["job"] is None


def test_a_lease_ends_with_its_job_or_its_time():
    now = [0.0]
    lease = Lease(5.0, lambda: now[0])
    first, second = job("a", 1).of_process(0), job("a", 2).of_process(0)
    assert lease.take(first) and not lease.take(first) and lease.take(second)
    with pytest.raises(RefusedError, match="is in rollout.urls twice, under two names"):
        lease.take(dataclasses.replace(second, owner="other", engine=1))
    now[0] = 4.0
    lease.renew(second.owner)
    now[0] = 8.0
    with pytest.raises(RefusedError, match="is in use by run a 2; choose another server, or end that job and wait 1 s"):
        lease.take(job("b"))
    now[0] = 9.0
    assert lease.take(other := job("b"))
    with pytest.raises(RefusedError, match="has been taken by run b 1"):
        lease.renew(second.owner)
    lease.release(other.owner)
    with pytest.raises(LookupError, match="has lost it"):
        lease.take(other)
    assert lease.job is None and lease.take(job("c"))


def test_a_new_process_of_a_job_takes_the_server_and_what_has_left_does_not_come_back(server, weights, expected):
    with engine(server.url, user := job("a", owner="secret")) as old:
        old.sync_weights(weights, 2)
        with engine(server.url, user) as new:
            with pytest.raises(WorkerError, match="another process of this job uses it"):
                old.sync_weights(weights, 4)
            with pytest.raises(WorkerError, match="no weights of this job"):
                new.generate(REQUESTS[:1])
            new.sync_weights(weights, 3)
            assert contents(new.generate(REQUESTS)) == expected
            server_engine.leave_servers([f"{server.url}/"], user)
            with pytest.raises(WorkerError, match="lost it"):
                new._post(protocol.LEASE, new._claim)


def test_every_route_wants_the_token_and_those_that_change_the_engine_are_not_passed_on(server, monkeypatch):
    routes = ["GET /", "GET /health", "GET /v1/models", "POST /v1/chat/completions", "POST /collective_rpc"]
    routes += ["POST /pause", "POST /trainer/../v1/models", f"GET {STATUS}", f"OPTIONS {protocol.WEIGHTS}"]
    jobs = (protocol.LEASE, protocol.RENEW, protocol.RELEASE, protocol.GENERATE, protocol.WEIGHTS)
    routes += [*(f"POST {path}" for path in jobs), f"PUT {protocol.UPLOAD}/a.safetensors"]
    with httpx.Client(base_url=server.url) as client:
        for route in routes:
            for header in ({}, {"Authorization": TOKEN}, {"Authorization": f"Bearer {TOKEN[:-1]}"}):
                answer = client.request(*route.split(), headers=header)
                assert answer.status_code == 401, route
                assert answer.json() == {"error": "this server needs its token"}
        for path in ("/collective_rpc", "/pause", "/reset_prefix_cache", "/sleep", "/trainer/alive", "/v1/load"):
            for method in ("GET", "POST"):
                assert client.request(method, path, headers=server.headers).status_code == 404, path
        for path in (protocol.RENEW, protocol.GENERATE, protocol.WEIGHTS):
            answer = client.post(path, headers=server.headers, json={})
            assert (answer.status_code, answer.json()["kind"]) == (409, protocol.LOST)
        for message in ({}, {"job": {}}, {"job": {"run": "a"}, "needs": {}}, [], "x"):
            assert client.post(protocol.LEASE, headers=server.headers, json=message).status_code == 400
    for process in server.family():
        assert TOKEN not in command_of(process)
    assert TOKEN not in server.log.read_text()
    assert all(VARIABLE not in process.environ() for process in server.engine())
    for token, sentence in (
        (None, "refuses the token of this job; set the environment variable TRAINER_INFERENCE_TOKEN"),
        ("another token of 24 letters", "refuses the token of this job"),
        (f"{TOKEN}\n", "TRAINER_INFERENCE_TOKEN: a token needs at least 16 printable"),
    ):
        monkeypatch.setenv(VARIABLE, token) if token else monkeypatch.delenv(VARIABLE)
        with pytest.raises(UserError, match=sentence) as raised, engine(server.url):
            pass
        assert TOKEN not in str(raised.value)


def test_people_use_the_openai_api_beside_the_job(server):
    with httpx.Client(base_url=server.url, headers=server.headers, timeout=300) as client:
        name = client.get("/v1/models").json()["data"][0]["id"]
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "model": name}
        answer = client.post("/v1/chat/completions", json=chat)
        assert answer.status_code == 200 and answer.json()["choices"][0]["message"]["role"] == "assistant"
        with client.stream("POST", "/v1/chat/completions", json={**chat, "stream": True}) as stream:
            assert [line for line in stream.iter_lines() if line][-1] == "data: [DONE]"


def test_requests_that_are_kept_continue_with_the_new_weights(server, weights, model):
    slow = make_requests(4)
    with engine(server.url) as one, ThreadPoolExecutor(1) as thread:
        one.sync_weights(weights, 1)
        slow = [dataclasses.replace(r, sampling=dataclasses.replace(r.sampling, max_tokens=290)) for r in slow]
        worker = server.engine()[-1]
        worker.suspend()  # until the server has the requests and the new weights
        one._begin(dict(enumerate(slow)))
        sync = thread.submit(one.sync_weights, SharedMemory(model), 2, "keep")
        time.sleep(1)
        worker.resume()
        sync.result(300)
        completions: dict = {}
        while len(completions) < 4:
            completions |= one.step({})
        versions = set()
        for completion in completions.values():
            spans = dict(completion.version_spans) or {completion.weight_versions[0]: len(completion.token_ids)}
            assert set(spans) <= {1, 2} and sum(spans.values()) == len(completion.token_ids)
            versions |= {tuple(sorted(spans))}
        assert (1, 2) in versions, "no request was under way when the weights came"
        one._begin(dict(enumerate(slow)))
        one.sync_weights(weights, 3)
        assert one.step({}) == {}, "requests under way are aborted"


def test_a_broken_connection_loses_the_server_and_an_interrupt_returns(server, weights, expected):
    """The pool then gives the requests to others, and a new process takes the server."""
    faults = Faults()
    with fault_proxy(server.url, faults) as url, engine(url) as one:
        one.sync_weights(weights, 3)
        faults.plan = lambda method, path, *_: CUT if path.endswith(protocol.GENERATE) else PASS
        with pytest.raises(WorkerError) as raised:
            one.generate(REQUESTS)
        assert raised.value.cause == "server"
    with engine(server.url) as one:
        one.sync_weights(weights, 3)
        one.interrupt()
        completions = one.step(dict(enumerate(REQUESTS)))
        assert not completions
        while len(completions) < len(REQUESTS):
            completions |= one.step({})
        assert contents([completions[number] for number in range(len(REQUESTS))]) == expected


def test_a_server_that_is_absent_or_another_program_is_named(monkeypatch):
    url = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setattr(time_limits, "SERVER_ABSENCE_S", 1.0)
    sentence = rf"{url} .*Connection refused.*waited for 1 s"
    with pytest.raises(WorkerError, match=sentence) as raised, engine(url):
        pass
    assert raised.value.cause == "server_absent"
    token = ["AQAAAA==", "", "stop", [1, 1], []]  # a token without its log-prob
    lease = b'{"start": "1", "lease_s": 60}'
    long = lease.replace(b"}", b', "more": "' + b"x" * (1 << 20) + b'"}')
    for path, answer in (
        *((protocol.LEASE, answer) for answer in (long, lease.replace(b"60", b"-60"), b"[" * 200_000)),
        *((protocol.LEASE, answer) for answer in (b"[]", b"{}", b"null", b'{"start": 1, "lease_s": 9}')),
        *((protocol.WEIGHTS, answer) for answer in (b"5", b"<html>")),
        *((protocol.GENERATE, answer) for answer in (b"<html>", b"null", b"[[0, 1]]", b"[0]", b"\xff")),
        (protocol.GENERATE, json.dumps([[0, *token]]).encode()),
    ):
        with answering({protocol.LEASE: lease, path: answer}) as url, SharedDirectory() as shared:
            with pytest.raises(UserError, match=f"{url} is no inference server of this project"), engine(url) as one:
                one.sync_weights(SharedMemory(shared.path), 1)
                one.generate(make_requests(1))


def test_completions_that_nobody_asked_for_are_refused():
    """They would end the job with a traceback, take all memory, or be trained on."""
    good = Completion([6, 1], [-1.0, -1.0], "length", (1, 1))
    line = protocol.encode_completions({0: good})
    bad = [
        protocol.encode_completions({0: dataclasses.replace(good, **changed)})
        for changed in (
            {"token_ids": [], "logprobs": []},
            {"token_ids": [6] * 17, "logprobs": [-1.0] * 17},  # 16 are asked for
            {"token_ids": [-1, 1]},
            {"token_ids": [300, 1]},
            {"weight_versions": (0, 1)},
            {"weight_versions": (1, 2)},
            {"finish_reason": "abort"},
            {"version_spans": ((1, 1), (1, 2))},
        )
    ]
    bad += [protocol.encode_completions({7: good}), line + line]
    bad += [b"[[1e999" + line[3:], b"[" * 200_000, b" " * (2 << 20)]  # the last one is part of a line without end
    user = dataclasses.replace(job(), architecture={"vocab_size": 300})
    with SharedDirectory() as shared:
        answers = {protocol.LEASE: b'{"start": "1", "lease_s": 60}'}
        with answering(answers) as url, engine(url, user) as one:
            one.sync_weights(SharedMemory(shared.path), 1)
            for answers[protocol.GENERATE] in bad:
                with pytest.raises(UserError, match="is no inference server of this project \\([^()]"):
                    one.step({0: make_requests(1)[0], 1: make_requests(2)[1]})
                    one.step({})  # of two answers to one request, the first may have come alone
                one.sync_weights(SharedMemory(shared.path), 1)
            answers[protocol.GENERATE] = line
            assert contents(one.generate(make_requests(1))) == contents([good])


def test_no_connection_is_left_open():
    def connections(port: int) -> list:
        found = psutil.Process().net_connections("tcp")
        return [one for one in found if one.raddr and one.raddr.port == port and one.status == "ESTABLISHED"]

    with answering({protocol.LEASE: b'{"start": "1", "lease_s": 60}'}) as url:
        port = int(url.rpartition(":")[2])
        with engine(url):
            assert connections(port)
        assert connections(port) == []


def test_what_a_server_refuses_before_it_starts(monkeypatch):
    for host in ("0.0.0.0", "::", "10.0.0.7", "example.org"):
        cfg = compose([f"inference.host='{host}'"])
        monkeypatch.delenv(VARIABLE, raising=False)
        with pytest.raises(UserError, match=f"inference.host={host}: others can reach .* variable {VARIABLE}"):
            check(cfg)
        monkeypatch.setenv(VARIABLE, "x" * 16)
        assert check(cfg) == "x" * 16
    for token in ("", "short", "é" * 20, "a" * 20 + "\n"):
        monkeypatch.setenv(VARIABLE, token)
        with pytest.raises(UserError, match="needs at least 16 printable ASCII characters"):
            check(compose([]))
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=f"inference.port={port}: cannot listen there .*in use"):
            listen("127.0.0.1", port, f"inference.port={port}")
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "127.1.2.3", "::1", "[::1]")))
    assert not is_loopback("127.0.0.1.evil.example") and not is_loopback(socket.gethostname() + ".example")


def test_only_files_that_are_these_very_files_are_here(tmp_path):
    (tmp_path / "a").write_text("1")
    files = protocol.fingerprint(str(tmp_path))
    assert _is_here(str(tmp_path), files)
    assert not _is_here(str(tmp_path), {}) and not _is_here(str(tmp_path), {"a": [1, 1, 1]})
    os.symlink(tmp_path, link := tmp_path.parent / f"{tmp_path.name} link")
    assert not _is_here(str(link), files) and not _is_here(str(tmp_path / "no"), files) and not _is_here(3, files)


def test_the_processes_of_an_engine_reach_each_other_on_this_machine_alone(monkeypatch):
    for name in ("GLOO_SOCKET_IFNAME", "VLLM_HOST_IP", "VLLM_RPC_BASE_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "chosen")
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    found = _environment("/tmp/private")
    assert (found["GLOO_SOCKET_IFNAME"], found["NCCL_SOCKET_IFNAME"]) == ("lo", "chosen")
    assert (found["VLLM_HOST_IP"], found["VLLM_RPC_BASE_PATH"]) == ("127.0.0.1", "/tmp/private")
    assert "VLLM_API_KEY" not in found and "VLLM_RPC_BASE_PATH" not in _environment("/tmp/" + "x" * 70)


def test_the_arguments_of_the_engine_follow_from_the_config(model, tmp_path):
    copy = shutil.copytree(model, tmp_path / "m")
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": 7, "top_p": 0.5}))
    (tmp_path / "chat.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    rollout = dataclasses.replace(ROLLOUT, engine_args={"enable_prefix_caching": False})
    settings = {"model_path": str(copy), "name": "n", "seed": 1, "trust_remote_code": False, "device": "cpu"}
    settings |= {"rollout": dataclasses.asdict(rollout), "chat_template_kwargs": {}}
    settings["chat_template"] = str(tmp_path / "chat.jinja")
    (directory := tmp_path / "engine").mkdir()
    write_generation_config(str(directory), settings)
    write_chat_template(str(directory), settings)
    words = arguments(f"{directory}/s", settings)
    pairs = dict(zip(words, words[1:], strict=False))
    assert (pairs["--uds"], pairs["--max-model-len"]) == (f"{directory}/s", "364")
    assert pairs["--logprobs-mode"] == "processed_logprobs" and pairs["--generation-config"] == str(directory)
    assert {"--no-enable-chunked-prefill", "--no-enable-prefix-caching"} <= set(words)
    assert "--skip-tokenizer-init" not in words
    eos = json.loads((copy / "config.json").read_text())["eos_token_id"]
    written = json.loads((directory / "generation_config.json").read_text())
    assert written == {"eos_token_id": [eos, 7], "top_p": 0.5}, "vLLM reads the generation config alone"
    assert "m.content" in Path(pairs["--chat-template"]).read_text()


def test_the_process_that_speaks_for_a_server_imports_no_torch():
    """Every start of a job would wait for that import once more."""
    code = (
        "import pickle, sys\n"
        "from functools import partial\n"
        "from trainer.config import ENGINES\n"
        "from trainer.generation.engine import SharedMemory, build_engine\n"
        "spec = ENGINES['server']\n"
        "pickle.loads(pickle.dumps([partial(build_engine, spec), SharedMemory('weights')]))\n"
        "import trainer.cluster.fork_server, trainer.generation.server_engine\n"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.release
def test_a_model_that_cannot_be_loaded_ends_the_server_with_one_sentence(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text('{"model_type": "qwen3"}')
    with Server(tmp_path / "log", f"model.path={tmp_path / 'model'}") as server:
        assert server.process.wait(300) in (1, 2)
        assert "error: " in (tmp_path / "log").read_text().splitlines()[-1]


@pytest.mark.release
def test_the_engine_hangs_under_a_job_that_samples_ahead(server, model, tmp_path):
    """The server kills an engine whose worker hangs, and starts it again; no shared memory is left behind. The numbers
    equal those of an uninterrupted job, also where a batch ahead was cut off.
    """
    words = [f"model.path={model}", "rollout=server", f"rollout.urls=[{server.url}]", "rollout.max_num_seqs=20",
             "rollout.max_response_tokens=32", "rollout.ahead=1", "trainer.total_steps=3", "trainer.val_interval=3",
             "trainer.max_restarts=0"]  # fmt: skip
    whole = run_forked_job(*words, "trainer.run_dir=whole", cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    run, log = tmp_path / "run", tmp_path / "log"
    job = start_forked_job(*words, "trainer.run_dir=run", cwd=tmp_path, log=log)
    lines = run / "metrics.jsonl"
    wait_until(lambda: job.poll() is not None or (lines.exists() and '"step": 1,' in lines.read_text()))
    segments = _mapped_segments(server.process.pid)
    old = server.engine()
    old[-1].send_signal(signal.SIGSTOP)
    assert job.wait(400) == 0, log.read_text()
    assert "inference server" in (run / "log.txt").read_text()
    assert comparable(metrics(run)) == comparable(metrics(tmp_path / "whole"))
    assert not psutil.wait_procs(old, 120)[1]
    assert segments and not any(map(os.path.exists, segments))


def test_nothing_is_left_when_the_front_is_killed(server):
    segments, family = _mapped_segments(server.process.pid), server.family()
    server.kill()
    assert not psutil.wait_procs(family, 120)[1]
    assert segments and not any(map(os.path.exists, segments))
