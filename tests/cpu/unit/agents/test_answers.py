"""Answers as objects and as events."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

from tests.cpu.unit.agents.test_requests import parse
from trainer.agents.call_tree import Answer
from trainer.agents.chat_wire import ChatWire
from trainer.agents.messages import ChatMessage
from trainer.environments.tools import split_calls
from trainer.generation.engine import Completion

CALLS = 'Hm <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call><tool_call>{"name": "g"}</tool_call>'


def answer(text: str, reason: str = "stop", **fields: Any) -> Answer:
    completion = Completion(list(map(ord, text)), [-0.5] * len(text), reason, 1)
    turn: Any = SimpleNamespace(key="ab::0", prompt_length=5, completed=completion)
    return Answer(parse(**fields), "policy", turn, ChatMessage("assistant", *split_calls(text)))


def events_of(given: Answer) -> list[Any]:
    text = b"".join([ChatWire().start(given), *ChatWire().events(given, 0)]).decode()
    *events, end, rest = text.split("\n\n")
    assert end == "data: [DONE]" and rest == ""
    return [json.loads(event.removeprefix("data: ")) for event in events]


def test_an_answer_has_what_clients_read():
    whole = ChatWire().whole(answer("ab"))
    assert whole["usage"] == {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert (whole["object"], whole["model"]) == ("chat.completion", "policy")
    assert ChatWire().whole(answer("", reason="length"))["choices"][0] == {
        "index": 0, "message": {"role": "assistant", "content": ""}, "finish_reason": "length", "logprobs": None
    }  # fmt: skip


def test_calls_of_tools_have_ids_that_are_the_same_again():
    (choice,) = ChatWire().whole(answer(CALLS))["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "Hm"
    assert [call["function"] for call in choice["message"]["tool_calls"]] == [
        {"name": "f", "arguments": '{"a": 1}'},
        {"name": "g", "arguments": "{}"},
    ]
    ids = [call["id"] for call in choice["message"]["tool_calls"]]
    assert len(set(ids)) == 2 and ids == [
        call["id"] for call in ChatWire().whole(answer(CALLS))["choices"][0]["message"]["tool_calls"]
    ]
    assert ChatWire().whole(answer(CALLS[3:]))["choices"][0]["message"]["content"] is None


def test_events_add_up_to_the_answer():
    events = events_of(answer(CALLS))
    own = [event["choices"][0] for event in events]
    assert "".join(choice["delta"].get("content") or "" for choice in own) == "Hm"
    assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + ["tool_calls"]
    calls = [call for event in events for call in event["choices"][0]["delta"].get("tool_calls", [])]
    assert [(call["index"], call["function"]["name"]) for call in calls] == [(0, "f"), (1, "g")]
    assert all("usage" not in event for event in events)


def test_a_stream_ends_with_the_usage_if_that_is_wanted():
    *events, last = events_of(answer("ab", stream_options={"include_usage": True}))
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 2
    assert all(event["usage"] is None for event in events)
