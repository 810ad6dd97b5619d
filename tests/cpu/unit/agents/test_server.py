"""The server: what clients see of an episode, and of what is none."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import queue
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.agents import Policy, run_beside, runs_of
from tests.support.episodes import event_loop
from trainer.agents.call_tree import CallTree
from trainer.agents.episode import AgentEpisode
from trainer.agents.requests import Rules
from trainer.agents.server import AgentServer, shared_server
from trainer.errors import UserError
from trainer.files.redaction import redact_text
from trainer.generation.engine import Sampling
from trainer.sandbox.limits import LARGEST_MESSAGE
from trainer.seeding import turn_seed

USUAL = Sampling(1.0, 1.0, -1, 64, (4,))
SAID = [{"role": "user", "content": "hé"}]
TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


@pytest.fixture(scope="module")
def server() -> Iterator[AgentServer]:
    with shared_server("127.0.0.1", 0, None) as server:
        event_loop().run(server.start())
        yield server


class Served:
    """An episode at a server, whose policy repeats the end of its prompt. `held` keeps its answers back, `delay_s`
    delays them."""

    def __init__(self, server: AgentServer, tokenizer: Any, reply: str = ""):
        import openai

        self.policy = Policy(tokenizer, lambda prompt, seed: reply or f"{prompt[-20:-13]}!")
        self.held: queue.SimpleQueue[Any] | None = None
        self.delay_s = 0.0
        self.server = server
        rules = Rules("policy", USUAL, USUAL, overrides=False, max_turns=5)
        self.episode = AgentEpisode(
            CallTree(tokenizer, 2000), rules, lambda key: turn_seed(1, 1, "0:0", 0, key), self._submit, server.address
        )
        server.add(self.episode)
        self.url = self.episode.base_url
        self.client = openai.OpenAI(base_url=self.url, api_key="any", max_retries=3)

    def _submit(self, episode: AgentEpisode, turn: Any, request: Any) -> None:
        answer = (episode.complete, turn, self.policy.complete(request))
        if self.held is None:
            asyncio.get_running_loop().call_later(self.delay_s, *answer)
        else:
            self.held.put(answer)

    def release(self) -> None:
        assert self.held is not None
        event_loop().call(*self.held.get())

    def post(self, path: str = "/chat/completions", **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, timeout=300, trust_env=False, **options)

    def trained(self) -> list[str]:
        runs = [run for sample in self.episode.tree.samples() for run in runs_of(sample)]
        return [self.policy.tokenizer.decode(tokens) for _, tokens, _ in runs]


@pytest.fixture
def served(server, tokenizer) -> Served:
    return Served(server, tokenizer)


def test_openai_s_client_gets_replies(served):
    answer = served.client.chat.completions.create(model="policy", messages=SAID)
    assert answer.choices[0].message.content == "ser|>hé!"
    assert answer.choices[0].finish_reason == "stop" and answer.usage.total_tokens == 5 + 10
    assert served.trained() == ["ser|>hé!<|end|>"]


def test_openai_s_client_gets_a_stream(server, tokenizer):
    served = Served(server, tokenizer, f"Hm{CALL}")
    given: Any = {"model": "policy", "messages": SAID, "tools": [TOOL]}
    chunks = list(served.client.chat.completions.create(stream=True, **given))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hm"
    with served.client.chat.completions.stream(**given) as stream:
        message = stream.get_final_completion().choices[0].message
    assert message.content == "Hm" and message.tool_calls[0].function.arguments == '{"a": 1}'
    assert served.trained() == [f"Hm{CALL}<|end|>"] * 2


def test_wrong_addresses_and_methods_get_an_error_that_says_so(served):
    for method, path, status, code in [
        ("POST", "/completions", 404, "wrong_url"),
        ("POST", "/../../../x", 404, "wrong_url"),
        ("GET", "/chat/completions", 405, "wrong_method"),
        ("GET", "/models", 404, "wrong_url"),
    ]:
        answer = httpx.request(method, served.url + path, trust_env=False)
        assert answer.status_code == status and answer.headers["x-should-retry"] == "false"
        assert answer.json()["error"]["code"] == code and answer.json()["error"]["message"]


def test_bad_requests_get_an_error_that_clients_do_not_repeat(served):
    import openai

    answer = served.post(content=b"{")
    assert answer.status_code == 400 and "no JSON" in answer.json()["error"]["message"]
    answer = served.post(content=b" " * (LARGEST_MESSAGE + 1))
    assert answer.status_code == 400 and "more than 16,777,216 bytes" in answer.json()["error"]["message"]
    with pytest.raises(openai.BadRequestError, match="temperature=0.2: the run samples with 1"):
        served.client.chat.completions.create(model="policy", messages=SAID, temperature=0.2)
    with pytest.raises(openai.BadRequestError, match="there is no model 'gpt-4o'; the policy is called policy"):
        served.client.chat.completions.create(model="gpt-4o", messages=SAID)
    for _ in range(5):
        served.client.chat.completions.create(model="policy", messages=SAID)
    with pytest.raises(openai.BadRequestError, match="environment.max_turns=5"):
        served.client.chat.completions.create(model="policy", messages=SAID)
    assert len(served.policy.asked) == 5


@pytest.mark.parametrize("name", ["temperature", "top_p", "top_k"])
@pytest.mark.parametrize("value", ["1" + "0" * 400, "NaN", "-Infinity", "1e999", "true"])
def test_a_number_that_no_float_holds_is_refused(served, name, value):
    body = f'{{"model": "policy", "messages": [{{"role": "user", "content": "a"}}], "{name}": {value}}}'
    answer = served.post(content=body.encode())
    assert answer.status_code == 400 and f"{name} must be a number" in answer.json()["error"]["message"]


@pytest.mark.parametrize("body", [b"{}", gzip.compress(b"{}", mtime=0)])
def test_a_compressed_body_is_refused(served, caplog, body):
    answer = served.post(content=body, headers={"Content-Encoding": "gzip"})
    assert answer.status_code == 415 and "Content-Encoding: gzip" in answer.json()["error"]["message"]
    assert caplog.records == [], "the job's log is no place for the mistakes of agents"


@pytest.mark.parametrize("path, status", [("/chat/completions", 400), ("/completions", 404)])
def test_a_client_that_sends_all_of_a_huge_body_first_gets_the_answer(served, path, status):
    request = urllib.request.Request(served.url + path, data=b" " * 100_000_000)
    with pytest.raises(urllib.error.HTTPError) as refusal:
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=300)
    assert refusal.value.code == status and json.load(refusal.value)["error"]["message"]


def test_after_the_end_calls_are_refused(server, served):
    import openai

    served.client.chat.completions.create(model="policy", messages=SAID)
    served.held = queue.SimpleQueue()
    waiting = run_beside(lambda: served.client.chat.completions.create(model="policy", messages=SAID))
    answer = served.held.get()
    event_loop().call(server.discard, served.episode)
    with pytest.raises(openai.APIStatusError, match="the episode has ended") as refusal:
        waiting()
    assert refusal.value.status_code == 400
    event_loop().call(*answer)
    with pytest.raises(openai.APIStatusError, match="the episode has ended"):
        served.client.chat.completions.create(model="policy", messages=SAID)
    assert len(served.trained()) == 1
    stranger = openai.OpenAI(base_url=server.address("f" * 32), api_key="any")
    with pytest.raises(openai.APIStatusError, match="there was none at this address"):
        stranger.chat.completions.create(model="policy", messages=SAID)


@contextlib.contextmanager
def broken_request(served: Served) -> Iterator[bytes]:
    """Send a request; break the connection at the end of the block."""
    url = httpx.URL(served.url)
    body = json.dumps({"model": "policy", "messages": SAID}).encode()
    with socket.create_connection((url.host, url.port)) as connection:
        connection.sendall(
            f"POST {url.path}/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        yield body


def test_a_request_whose_connection_broke_is_one_turn(served):
    served.held = queue.SimpleQueue()
    with broken_request(served) as body:
        while not served.policy.asked:
            time.sleep(0.001)
    again = run_beside(lambda: served.post(content=body))
    while not event_loop().call(lambda: any(each.readers for each in served.episode._calls)):
        time.sleep(0.001)
    served.release()
    assert again().json()["choices"][0]["message"]["content"] == "ser|>hé!"
    assert len(served.policy.asked) == 1 == len(served.trained())


def test_a_request_that_nobody_repeats_is_not_trained(served):
    served.held = queue.SimpleQueue()
    with broken_request(served):
        while not served.policy.asked:
            time.sleep(0.001)
    while event_loop().call(lambda: any(each.readers for each in served.episode._calls)):
        time.sleep(0.001)
    served.release()
    served.held = None
    served.post(json={"model": "policy", "messages": [{"role": "user", "content": "other"}]})
    assert len(served.policy.asked) == 2 and served.trained() == ["|>other!<|end|>"]


def test_a_failure_of_the_endpoint_is_an_error_too(served, caplog):
    served._submit = None
    served.episode._submit = lambda *_: 1 / 0  # a bug
    answer = served.post(json={"model": "policy", "messages": SAID})
    assert answer.status_code == 500 and "the log of the job says why" in answer.json()["error"]["message"]
    assert answer.headers["x-should-retry"] == "false" and "ZeroDivisionError" in caplog.text


def test_no_log_line_holds_the_permission_to_use_an_episode(served, caplog):
    url = httpx.URL(served.url)
    for path in (url.path, url.path[:25]):
        with socket.create_connection((url.host, url.port)) as connection:
            connection.sendall(f"GET {path}/models HTTP/1.1\r\nGET {path}/models is no header\r\n\r\n".encode())
            assert connection.recv(100).startswith(b"HTTP/1.0 400")
    assert "Error handling request from 127.0.0.1" in caplog.text
    assert served.episode.secret[:12] not in caplog.text
    assert served.episode.secret not in redact_text(f"HTTPStatusError: 404 for url {served.url}/models")


def test_several_users_of_an_address_share_a_server(tokenizer):
    with shared_server("127.0.0.2", 0, None) as one:
        with shared_server("127.0.0.2", 0, None) as two, shared_server("127.0.0.2", 0, "http://x") as other:
            assert one is two is not other
            event_loop().run(two.start())
            event_loop().run(one.start())
        Served(one, tokenizer).client.chat.completions.create(model="policy", messages=SAID)
    with shared_server("127.0.0.2", 0, None) as later:
        assert later is not one


def test_an_address_that_cannot_be_used_is_refused(server):
    port = int(server.address("x").split(":")[2].split("/")[0])
    with pytest.raises(UserError, match="agent_address=127.0.0.1:.*: cannot listen there"):
        AgentServer("127.0.0.1", port)
    with pytest.raises(UserError, match="environment.agent_address=no.such.host:0"):
        AgentServer("no.such.host")


def test_agents_are_told_another_address():
    with shared_server("127.0.0.1", 0, "http://host.docker.internal:8123/") as server:
        assert server.address("s") == "http://host.docker.internal:8123/episodes/s/v1"
