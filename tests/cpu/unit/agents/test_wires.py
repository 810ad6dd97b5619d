"""The APIs of the endpoint beside the chat API, with the clients that their makers publish."""

from __future__ import annotations

import dataclasses
import itertools
import json
import queue
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.cpu.unit.agents.test_server import Served
from tests.support.agents import run_beside
from tests.support.episodes import event_loop
from trainer.agents.messages import ApiError
from trainer.agents.messages_wire import MessagesWire
from trainer.agents.requests import Rules, parse_request
from trainer.agents.responses_wire import ResponsesWire
from trainer.agents.server import AgentServer, shared_server
from trainer.generation.engine import Sampling
from trainer.process import time_limits
from trainer.sandbox.limits import LARGEST_MESSAGE

CALL = '<tool_call>\n{"name": "add", "arguments": {"b": 5e3, "a": 12345678901234567890}}\n</tool_call>'
REPLIES = [f"<think>\nHm.\n</think>\n\nI add.\n{CALL}", f"Again.\n{CALL}", "<think>\nSo.\n</think>\n\nDone."]
SCHEMA = {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}}
USUAL = Sampling(1.0, 0.9, -1, 32, (4,))
LONG = dataclasses.replace(USUAL, max_tokens=500)
RULES = Rules("policy", USUAL, USUAL, overrides=False, max_turns=6)


@pytest.fixture(scope="module")
def server() -> Iterator[AgentServer]:
    with shared_server("127.0.0.1", 0, None) as server:
        event_loop().run(server.start())
        yield server


@pytest.fixture
def served(server, tokenizer) -> Served:
    """An episode whose policy says `REPLIES`, one after another."""
    served = Served(server, tokenizer)
    served.episode.rules = dataclasses.replace(RULES, sampling=LONG, usual=LONG, max_turns=5)
    replies = itertools.cycle(REPLIES)
    served.policy.say = lambda prompt, seed: next(replies)
    return served


def of_javascript(value: Any) -> Any:
    """Return a value as JavaScript parses and writes it: it knows doubles alone, and writes 5000.0 as 5000."""
    if isinstance(value, dict):
        return {name: of_javascript(one) for name, one in value.items()}
    return int(float(value)) if isinstance(value, int | float) else value


def assert_one_sample(served: Served) -> None:
    assert served.trained() == [f"{reply}<|end|>" for reply in REPLIES]
    assert len(served.episode.tree.samples()) == 1


@pytest.mark.parametrize("stream, delay_s", [(False, 0), (True, 0), (True, 0.1)])
@pytest.mark.parametrize("with_thoughts", [False, True])
def test_anthropic_s_client_runs_an_episode_that_gives_one_sample(served, stream, delay_s, with_thoughts, monkeypatch):
    import anthropic  # it takes a second, which only this file needs

    served.delay_s = delay_s
    monkeypatch.setattr(time_limits, "STREAM_QUIET_S", 0.03)
    url = served.url.removesuffix("/v1")
    client = anthropic.Anthropic(base_url=url, auth_token="any")
    tools = [{"name": "add", "description": "Adds.", "input_schema": SCHEMA}]
    messages: list[Any] = [{"role": "user", "content": "1+2?"}, {"role": "system", "content": "Use tools."}]
    for reply in range(3):
        given: Any = {"model": "policy", "max_tokens": 20_000, "messages": messages, "tools": tools, "system": "Brief."}
        if stream:
            with client.messages.stream(**given) as events:
                answer = events.get_final_message()
        else:
            answer = client.messages.create(**given)
        prompt = served.policy.asked[-1].prompt_token_ids
        assert (answer.usage.input_tokens, answer.usage.output_tokens) == (len(prompt), len(REPLIES[reply]) + 1)
        content = [block.to_dict() for block in answer.content if with_thoughts or block.type != "thinking"]
        assert (content[0] == {"type": "text", "text": ""}) == (delay_s > 0 and reply != 1), "a late stream begins so"
        content = [block for block in content if block.get("text") != ""]
        kinds = [block["type"] for block in content if block["type"] != "thinking"]
        assert kinds == ["text", "tool_use"][: 1 if reply == 2 else 2]
        for block in content:
            if block["type"] == "tool_use":
                block["input"] = of_javascript(block["input"])
        content[-1]["cache_control"] = {"type": "ephemeral"}  # it moves to the newest message
        answers = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": [{"type": "text", "text": "3"}]}
            for block in content
            if block["type"] == "tool_use"
        ]
        messages += [{"role": "assistant", "content": content}, {"role": "user", "content": answers}]
        assert answer.stop_reason == ("tool_use" if answers else "end_turn")
        if messages[-3]["role"] == "user" and isinstance(messages[-3]["content"], list):
            messages[-3]["content"][0]["content"] = "3"  # the same result, as text
    assert_one_sample(served)
    texts = [block.text for block in answer.content if block.type == "text"]
    thoughts = [(block.thinking, bool(block.signature)) for block in answer.content if block.type == "thinking"]
    assert texts[-1:] == ["\n\nDone."] and thoughts == [("So.", True)]


@pytest.mark.parametrize("stream, delay_s", [(False, 0), (True, 0), (True, 0.1)])
@pytest.mark.parametrize("sends", ["items", "ids of items", "the id of the response"])
def test_openai_s_client_of_responses_runs_an_episode_that_gives_one_sample(
    served, stream, delay_s, sends, monkeypatch
):
    import openai

    served.delay_s = delay_s
    monkeypatch.setattr(time_limits, "STREAM_QUIET_S", 0.03)
    client = openai.OpenAI(base_url=served.url, api_key="any")
    tools: list[Any] = [
        {"type": "function", "name": "add", "description": "Adds.", "parameters": SCHEMA, "strict": None},
        {"type": "web_search"},
    ]
    asked: Any = "1+2?"
    history: list[Any] = [{"role": "user", "content": "1+2?"}]
    previous = None
    for reply in range(3):
        given: Any = {"model": "policy", "instructions": "Brief.", "tools": tools, "max_output_tokens": 20_000}
        if sends == "the id of the response":
            given |= {"input": asked, "previous_response_id": previous}
        else:
            given |= {"input": history, "store": False, "include": ["reasoning.encrypted_content"]}
        if stream:
            with client.responses.stream(**given) as events:
                answer = events.get_final_response()
        else:
            answer = client.responses.create(**given)
        prompt = served.policy.asked[-1].prompt_token_ids
        assert (answer.usage.input_tokens, answer.usage.output_tokens) == (len(prompt), len(REPLIES[reply]) + 1)
        assert all(item.id for item in answer.output)
        previous = answer.id
        if sends == "ids of items":
            own = {"reasoning", "message"}
            items = [
                {"type": "item_reference", "id": item.id} if item.type in own else item.to_dict()
                for item in answer.output
            ]
        else:
            items = [{**item.to_dict(), "id": None, "phase": None} for item in answer.output]
        for item in items:
            if item["type"] == "function_call":
                item["arguments"] = json.dumps(of_javascript(json.loads(item["arguments"])))
        asked = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "3"}
            for item in answer.output
            if item.type == "function_call"
        ]
        history += [*items, *asked]
        assert answer.status == "completed" and len(asked) == (reply < 2)
    assert_one_sample(served)
    assert answer.output_text == "\n\nDone." and answer.output[0].encrypted_content


def begin_late_stream(served: Served, path: str, monkeypatch: Any) -> tuple[Any, Iterator[str], dict[str, Any]]:
    """Ask for a stream, and read events until one says that the reply is under way; return connection, lines, body."""
    monkeypatch.setattr(time_limits, "STREAM_QUIET_S", 0.01)
    served.held = queue.SimpleQueue()
    said = [{"role": "user", "content": "1+2?"}]
    body = {"model": "policy", "stream": True, "max_tokens": 500, "messages": said}
    if path == "responses":
        body = {"model": "policy", "stream": True, "input": said}
    opened = httpx.stream("POST", f"{served.url}/{path}", json=body, timeout=60, trust_env=False)
    lines = opened.__enter__().iter_lines()
    sign = {"messages": "text_delta", "responses": "response.in_progress", "chat/completions": '"delta": {}'}[path]
    for _ in range(3):  # again and again
        next(line for line in lines if line.startswith("data: ") and sign in line)
    return opened, lines, body


@pytest.mark.parametrize("path", ["messages", "responses", "chat/completions"])
def test_a_stream_whose_reply_is_late_has_signs_of_life(served, path, monkeypatch):
    opened, lines, _ = begin_late_stream(served, path, monkeypatch)
    served.release()
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]
    opened.__exit__(None, None, None)
    assert any("I add." in line for line in data) and served.trained() == [f"{REPLIES[0]}<|end|>"]
    numbers = [json.loads(line)["sequence_number"] for line in data if path == "responses"]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else path != "responses"


@pytest.mark.parametrize("path", ["messages", "responses", "chat/completions"])
def test_a_late_stream_whose_episode_ends_says_so(served, path, monkeypatch):
    opened, lines, body = begin_late_stream(served, path, monkeypatch)
    event_loop().call(served.server.discard, served.episode)
    (last,) = [line for line in lines if "the episode has ended" in line]
    opened.__exit__(None, None, None)
    failed = json.loads(last.removeprefix("data: "))
    assert failed["type"] == "error" and failed["error"]["code"] == "episode_ended"
    assert httpx.post(f"{served.url}/{path}", json=body, trust_env=False).status_code == 400


def test_a_late_stream_that_breaks_is_joined_by_the_request_without_a_stream(served, monkeypatch):
    opened, _, body = begin_late_stream(served, "messages", monkeypatch)
    opened.__exit__(None, None, None)
    while event_loop().call(lambda: any(each.readers for each in served.episode._calls)):
        time.sleep(0.001)
    again = run_beside(lambda: served.post("/messages", json={**body, "stream": False}))
    while not event_loop().call(lambda: any(each.readers for each in served.episode._calls)):
        time.sleep(0.001)
    served.release()
    assert again().json()["content"][-1]["text"] == f"\n\nI add.\n{CALL}"
    assert len(served.policy.asked) == 1 == len(served.trained())


def test_a_side_request_is_answered_and_not_trained(served):
    import anthropic

    client = anthropic.Anthropic(base_url=served.url.removesuffix("/v1"), auth_token="any")
    said: Any = {"max_tokens": 50, "messages": [{"role": "user", "content": "1+2?"}]}
    title = client.messages.create(model="policy-side", **said)
    assert title.content[-1].text.startswith("\n\nI add.")
    config = {"format": {"type": "json_schema", "schema": {}}}
    client.messages.create(model="policy", extra_body={"output_config": config}, **said)
    assert served.episode.tree.samples() == [] and served.episode.tree.transcript() == ([], 0)
    for _ in range(5):  # those of the task are as many as ever
        served.client.chat.completions.create(model="policy", messages=said["messages"])
    assert len(served.episode.tree.samples()) == 5


def test_what_the_policy_thought_tells_equal_answers_apart(served):
    """An agent asks twice, and goes on with the second reply, which differs from the first one in its thoughts."""
    replies = iter(["<think>1</think>So.", "<think>2</think>So.", "Yes."])
    served.policy.say = lambda prompt, seed: next(replies)
    said: list[Any] = [{"role": "user", "content": "1+2?"}]
    for _ in range(2):
        answer = served.client.chat.completions.create(model="policy", messages=said).choices[0].message
    said += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": "Sure?"}]
    served.client.chat.completions.create(model="policy", messages=said)
    tokenizer = served.policy.tokenizer
    whole = [tokenizer.decode(sample.token_ids) for sample in served.episode.tree.samples()]
    assert ["<think>2</think>" in text and "Yes." in text for text in whole] == [False, True]


def test_refusals_have_the_status_and_the_words_that_clients_know(served):
    import anthropic

    url = served.url.removesuffix("/v1")
    client = anthropic.Anthropic(base_url=url, auth_token="any")
    long: Any = [{"role": "user", "content": "a" * 3000}]
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: .* tokens > 2000 maximum") as refusal:
        client.messages.create(model="policy", max_tokens=50, messages=long)
    assert refusal.value.body["type"] == "error" and refusal.value.body["error"]["type"] == "invalid_request_error"
    for path in ("chat/completions", "messages", "responses"):
        assert httpx.post(f"{served.url}/{path}", content=b" " * (LARGEST_MESSAGE + 1)).status_code == 400
        socket = {"Connection": "Upgrade", "Upgrade": "websocket"}
        assert httpx.get(f"{served.url}/{path}", headers=socket).status_code == 426
    served.server.discard(served.episode)
    with pytest.raises(anthropic.BadRequestError, match="the episode has ended"):
        client.messages.create(model="policy", max_tokens=50, messages=long)


def test_fields_that_are_not_supported_are_refused_by_name():
    said = [{"role": "user", "content": "x"}]
    reply = {"role": "assistant", "content": "y"}
    for wire, fields, field in [
        (MessagesWire, {"messages": []}, "messages"),
        (MessagesWire, {"messages": [*said, reply]}, "messages"),
        (MessagesWire, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
        (MessagesWire, {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        (MessagesWire, {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        (MessagesWire, {"tool_choice": {"type": "any"}}, "tool_choice"),
        (MessagesWire, {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
         "tool_choice.disable_parallel_tool_use"),
        (MessagesWire, {"temperature": 0.5}, "temperature"),
        (MessagesWire, {"context_management": {"edits": [{"type": "clear_tool_uses"}]}}, "context_management"),
        (MessagesWire, {"output_config": {"format": {}}, "tools": [{"name": "f"}]}, "output_config.format"),
        (MessagesWire, {"mcp_servers": [{}]}, "mcp_servers"),
        (ResponsesWire, {"input": []}, "input"),
        (ResponsesWire, {"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id"),
        (ResponsesWire, {"input": [{"type": "computer_call"}]}, "input[0]"),
        (ResponsesWire, {"previous_response_id": "resp_1"}, "previous_response_id"),
        (ResponsesWire, {"include": ["message.output_text.logprobs"]}, "include"),
        (ResponsesWire, {"text": {"format": {"type": "json_schema"}}}, "text.format"),
        (ResponsesWire, {"tool_choice": "required"}, "tool_choice"),
        (ResponsesWire, {"parallel_tool_calls": False}, "parallel_tool_calls"),
        (ResponsesWire, {"background": True}, "background"),
        (ResponsesWire, {"conversation": "c"}, "conversation"),
    ]:  # fmt: skip
        usual = {"messages": said} if wire is MessagesWire else {"input": "x"}
        with pytest.raises(ApiError) as refusal:
            parse_request(json.dumps({"model": "policy", **usual, **fields}).encode(), RULES, wire())
        assert refusal.value.param == field and field in refusal.value.message and refusal.value.status == 400


def test_what_clients_send_by_default_is_accepted():
    for wire, fields in [
        (MessagesWire, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 128_000, "metadata": {"a": "b"},
                        "thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}, "tools": [],
                        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
                        "cache_control": {"type": "ephemeral"}, "stream": True}),
        (ResponsesWire, {"input": [{"role": "developer", "content": [{"type": "input_text", "text": "y"}]},
                                   {"role": "user", "content": "x"}, {"role": "developer", "content": "z"}],
                         "reasoning": {"effort": "low"}, "store": False, "stream": True, "prompt_cache_key": "k",
                         "client_metadata": {}, "parallel_tool_calls": True, "tool_choice": "auto", "include": [],
                         "tools": [{"type": "namespace", "name": "n", "tools": []}], "text": {"verbosity": "low"}}),
    ]:  # fmt: skip
        body = json.dumps({"model": "policy", **fields}).encode()
        request = parse_request(body, RULES, wire())
        assert [one.role for one in request.messages if one.role != "system"] == ["user"] and request.stream
        again = json.dumps({**json.loads(body), "stream": False}, sort_keys=True).encode()
        assert parse_request(again, RULES, wire()).digest == request.digest
