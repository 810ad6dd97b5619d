"""Fields of requests: which are supported, and how the others are refused."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from trainer.agents.chat_wire import ChatWire
from trainer.agents.messages import ApiError
from trainer.agents.requests import Rules, parse_request
from trainer.generation.engine import Sampling

USUAL = Sampling(1.0, 0.9, -1, 32, (4,))
RULES = Rules("policy", USUAL, USUAL, overrides=False, max_turns=6)
GREEDY = dataclasses.replace(RULES, sampling=dataclasses.replace(USUAL, temperature=0.0, top_p=1.0))
SAID = [{"role": "user", "content": "x"}]
TOOL = {"type": "function", "function": {"name": "f"}}


def parse(rules: Rules = RULES, **fields: Any) -> Any:
    return parse_request(json.dumps({"model": "policy", "messages": SAID, **fields}).encode(), rules, ChatWire())


def test_a_request_has_defaults():
    request = parse()
    assert [message.message for message in request.messages] == SAID
    assert (request.max_tokens, request.stop, request.stream) == (None, (), False)
    assert not request.tools and not request.reads_calls
    nothing = dict.fromkeys(("n", "stop", "max_tokens", "temperature", "tools", "tool_choice", "seed", "stream"))
    assert dataclasses.replace(parse(**nothing), digest="") == dataclasses.replace(request, digest="")


def test_supported_fields_are_read():
    request = parse(n=1, max_tokens=9, max_completion_tokens=7, stop=["a", "b"], stream=True, seed=-5,
                    tools=[TOOL], stream_options={"include_usage": True}, user="me", top_p=0.9)  # fmt: skip
    assert (request.max_tokens, request.stop) == (7, ("a", "b"))
    assert request.stream and request.include_usage and request.reads_calls
    assert parse(stop="a").stop == ("a",)
    assert not parse(tools=[TOOL], tool_choice="none").reads_calls


def test_what_is_not_supported_is_refused_by_its_field():
    for fields, field in [
        ({"model": "gpt-4o"}, "model"),
        ({"model": None}, "model"),
        ({"messages": []}, "messages"),
        ({"n": 0}, "n"),
        ({"n": 2}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 1.5}, "max_completion_tokens"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": 3}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"x": 1}}, "stream_options"),
        ({"temperature": 0.2}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.5}, "top_p"),
        ({"top_k": 3}, "top_k"),
        ({"frequency_penalty": 0.1}, "frequency_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"functions": []}, "functions"),
        ({"guided_json": {}}, "guided_json"),
        ({"tools": "f"}, "tools"),
    ]:
        with pytest.raises(ApiError) as refusal:
            parse(**fields)
        assert refusal.value.param == field and field in refusal.value.message
        assert refusal.value.status == 400


def test_a_body_that_is_no_object_is_refused():
    for body in [b"", b"{", b"[]", b"\xff", b"[" * 5000, b'{"a":' + b"[" * 60 + b"]" * 60 + b"}"]:
        with pytest.raises(ApiError, match="body"):
            parse_request(body, RULES, ChatWire())


def test_requests_may_name_how_the_run_samples():
    """In training and in evaluations, which may sample in another way: the episode's own counts."""
    parse(temperature=1, top_p=0.9, top_k=-1)
    parse(GREEDY, temperature=0, top_p=1)
    parse(GREEDY, temperature=1.0, top_p=0.9)
    with pytest.raises(ApiError, match="temperature=0.5: the run samples with 1"):
        parse(GREEDY, temperature=0.5)
    parse(dataclasses.replace(RULES, overrides=True), temperature=0.2, top_p=0.1, top_k=40)


def test_a_digest_names_the_request():
    assert parse().digest == parse().digest != parse(user="me").digest
    assert parse(n=1, stream=False).digest == parse(stream=False, n=1).digest
