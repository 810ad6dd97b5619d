"""vLLM's own API server as the engine: the bits of an engine of the job, beside people who use its OpenAI API."""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import os
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest
from safetensors.torch import load_file, save_file

from tests.support.engines import start_vllm, vllm_launcher
from tests.support.generation import GREEDY, ROLLOUT, contents, make_requests, tokens_of, with_sampling
from tests.support.inference import ROLLOUT as WORDS
from tests.support.inference import Server, engine, free_port
from trainer.cluster.process_cluster import ProcessCluster
from trainer.config import Config, TinyConfig
from trainer.errors import UserError, WorkerError
from trainer.files.shared_memory import SharedDirectory
from trainer.generation.server_engine import servers_join_exactly
from trainer.generation.weight_sync import SharedMemory
from trainer.inference.backend import _mapped_segments
from trainer.inference.vllm_server import arguments, write_generation_config
from trainer.models.tiny import build_tiny

REQUESTS = [*make_requests(12, longest=200), *with_sampling(make_requests(4), GREEDY)]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("model"))
    # So wide that vLLM on CPU computes a batch of one token with other kernels.
    shape = TinyConfig(hidden_size=768, intermediate_size=2304, num_layers=1, num_heads=12, num_kv_heads=6, seed=5)
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
def weights(model):
    with SharedDirectory() as shared:
        tensors = load_file(f"{model}/model.safetensors")
        del tensors["lm_head.weight"]  # the ranks send it once
        save_file({name: tensor * 1.1 for name, tensor in tensors.items()}, f"{shared.path}/model.safetensors")
        yield SharedMemory(shared.path)


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    log = tmp_path_factory.mktemp("server") / "log"
    with Server(log, f"model.path={model}", "rollout.kv_cache_mb=64", *WORDS) as server:
        yield server.wait()


def test_completions_are_those_of_an_engine_of_the_job_to_the_last_bit(server, model, weights):
    with vllm_launcher() as launcher, ProcessCluster(Config(), "cpu", launcher) as cluster:
        own = start_vllm(cluster, model)
        own.sync_weights(weights, 3)
        expected = contents(own.generate(REQUESTS))
    with engine(server.url) as one:
        one.sync_weights(weights, 3)
        assert contents(one.generate(REQUESTS)) == expected
        assert contents(one.generate(REQUESTS[::-1]))[::-1] == expected
        assert contents([one.generate([request])[0] for request in REQUESTS[:4]]) == expected[:4]
        one.sync_weights(SharedMemory(model), 4)
        other = one.generate(REQUESTS)
        assert {c.weight_versions for c in other} == {(4, 4)} and tokens_of(other) != [row[0] for row in expected]
        one.sync_weights(weights, 3)
        assert contents(one.generate(REQUESTS)) == expected
    ports = [c for one in server.engine() for c in one.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    assert all(ipaddress.ip_address(port.laddr.ip).is_loopback for port in ports)


def test_it_says_that_the_company_of_a_request_changes_no_bits(server):
    assert servers_join_exactly([server.url, f"{server.url}/"], 60)
    assert not servers_join_exactly([server.url, f"http://127.0.0.1:{free_port()}"], 60), "one does not answer"


def test_people_use_the_openai_api_beside_the_job(server):
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "model": _name(server)}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=chat, timeout=300)
    assert answer.status_code == 200 and answer.json()["choices"][0]["message"]["role"] == "assistant"
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json={**chat, "stream": True}) as stream:
        assert [line for line in stream.iter_lines() if line][-1] == "data: [DONE]"
    for path in ("/collective_rpc", "/pause", "/sleep"):
        assert httpx.post(server.url + path, json={}).status_code == 404


def _name(server: Server) -> str:
    return httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"]


def test_an_engine_without_requests_leaves_the_cores_to_trainers(server):
    """Each look at its processes lets them run for a second without a pause, so the server seldom looks."""
    running = []
    for _ in range(80):
        running.append(any(process.status() == psutil.STATUS_RUNNING for process in server.engine()))
        time.sleep(0.1)
    assert sum(running) < len(running) / 4


def test_weights_of_another_model_are_refused_and_the_engine_lives(server, weights):
    tensors = load_file(f"{weights.path}/model.safetensors")
    with engine(server.url) as one, SharedDirectory() as shared:
        one.sync_weights(weights, 3)
        expected = contents(one.generate(REQUESTS))
        save_file({name: tensor[:-1].clone() for name, tensor in tensors.items()}, f"{shared.path}/model.safetensors")
        with pytest.raises(UserError, match="serves another model: model.embed_tokens.weight has the shape"):
            one.sync_weights(SharedMemory(shared.path), 4)
        one.sync_weights(weights, 3)
        assert contents(one.generate(REQUESTS)) == expected


def test_requests_that_are_kept_continue_with_the_new_weights(server, weights, model):
    slow = make_requests(8)
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
        while len(completions) < 8:
            completions |= one.step({})
        versions = set()
        for one in completions.values():
            spans = dict(one.version_spans) or {one.weight_versions[0]: len(one.token_ids)}
            assert set(spans) <= {1, 2} and sum(spans.values()) == len(one.token_ids)
            versions |= {tuple(sorted(spans))}
        assert (1, 2) in versions, "no request was under way when the weights came"


def test_an_engine_that_dies_while_it_checks_weights_does_not_refuse_them(server, weights):
    with engine(server.url) as one, ThreadPoolExecutor(1) as thread:
        one.sync_weights(weights, 1)
        worker = server.engine()[-1]
        worker.suspend()
        sync = thread.submit(one.sync_weights, weights, 2)
        time.sleep(1)
        worker.kill()
        with pytest.raises(WorkerError, match="does not serve") as caught:
            sync.result(300)
        assert caught.value.cause == "server"
    with engine(server.url, server_timeout_s=300.0) as one:
        one.sync_weights(weights, 3)
        assert len(one.generate(REQUESTS)) == len(REQUESTS)


def test_nothing_is_left_when_the_api_server_is_killed(server, weights):
    segments = _mapped_segments(server.process.pid)
    old = server.engine()
    api = old[1]
    api.send_signal(signal.SIGKILL)
    assert not psutil.wait_procs(old, 120)[1]
    with engine(server.url, server_timeout_s=300.0) as one:
        one.sync_weights(weights, 3)
        assert len(one.generate(REQUESTS)) == len(REQUESTS)
    assert segments and not any(map(os.path.exists, segments))


def test_nothing_is_left_when_the_front_is_killed(server):
    """The last test that uses the server."""
    segments = _mapped_segments(server.process.pid)
    family = server.family()
    server.kill()
    assert not psutil.wait_procs(family, 120)[1]
    assert segments and not any(map(os.path.exists, segments))


def test_the_server_ends_replies_with_every_end_token(model, tmp_path):
    """vLLM's own server reads the generation config, and not what the chat template writes."""
    copied = shutil.copytree(model, tmp_path / "m")
    (copied / "generation_config.json").write_text(json.dumps({"eos_token_id": 7, "top_p": 0.5}))
    write_generation_config(str(tmp_path), {"model_path": str(copied), "trust_remote_code": False})
    eos = json.loads((copied / "config.json").read_text())["eos_token_id"]
    written = json.loads((tmp_path / "generation_config.json").read_text())
    assert written == {"eos_token_id": [eos, 7], "top_p": 0.5}
    words = _words(f"{tmp_path}/engine", model)
    assert words[words.index("--generation-config") + 1] == str(tmp_path)


def _words(socket_path: str, model: str) -> list[str]:
    settings = {"model_path": model, "name": "n", "seed": 1, "trust_remote_code": False, "device": "cpu"}
    rollout = dataclasses.replace(ROLLOUT, engine_args={"enable_prefix_caching": False})
    return arguments(socket_path, {**settings, "rollout": dataclasses.asdict(rollout)})


def test_the_arguments_follow_from_the_config(model):
    words = _words("s", model)
    pairs = dict(zip(words, words[1:], strict=False))
    assert (pairs["--uds"], pairs["--max-model-len"]) == ("s", "364")
    assert pairs["--logprobs-mode"] == "processed_logprobs"
    assert {"--no-enable-chunked-prefill", "--no-enable-prefix-caching"} <= set(words)
    assert "--skip-tokenizer-init" not in words
