"""Requests of the chat API: which fields the endpoint supports, and how it refuses the others."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

from trainer.agents.messages import ApiError, ChatMessage, parse_messages, parse_tools
from trainer.files.documents import nests_deeply
from trainer.generation.engine import Sampling

_WITHOUT_EFFECT = {
    "metadata",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "seed",
    "service_tier",
    "store",
    "user",
}
"""Fields that change no token: the run draws with its own seeds."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "logprobs": (False,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "parallel_tool_calls": (True,),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
}
"""Fields that the endpoint accepts with these values alone."""
_SAMPLING = ("temperature", "top_p", "top_k")
_MOST_STOPS = 4


@dataclass(frozen=True)
class ChatRequest:
    """A request for a reply to a chat."""

    messages: list[ChatMessage]
    tools: tuple[dict[str, Any], ...]
    reads_calls: bool
    """Calls of tools in the reply are told from its text."""
    max_tokens: int | None
    """None: as many as the run allows."""
    stop: tuple[str, ...]
    """Texts that end a reply."""
    stream: bool
    include_usage: bool
    """A streamed answer ends with the number of tokens."""
    digest: str
    """Of all fields. A request that is repeated has the same."""


@dataclass(frozen=True)
class Rules:
    """How the endpoint reads the requests of an episode.

    Args:
        model: name of the policy.
        sampling: of the episode.
        usual: of the run's training.
        overrides: how a request wants to sample does not count (`environment.agent_sampling=override`).
        max_turns: most replies of an episode.
        max_tokens: most tokens of a prompt and its reply; None: no more than those of each.
    """

    model: str
    sampling: Sampling
    usual: Sampling
    overrides: bool
    max_turns: int
    max_tokens: int | None = None


def parse_request(body: bytes, rules: Rules) -> ChatRequest:
    """Return the request that a body holds.

    Raises:
        ApiError: it is no JSON, or has a field that the endpoint does not support.
    """
    fields = _fields(body)
    digest = xxhash.xxh3_128_hexdigest(json.dumps(fields, sort_keys=True).encode())
    given = {name: value for name, value in fields.items() if value is not None}
    model = given.pop("model", None)
    if model != rules.model:
        problem = "the request names no model" if model is None else f"there is no model {model!r:.100}"
        raise ApiError(f"{problem}; the policy is called {rules.model}", "model", "model_not_found", 404)
    messages = parse_messages(given.pop("messages", None))
    tools = parse_tools(given.pop("tools", []))
    options = given.pop("stream_options", {})
    if not isinstance(options, Mapping) or not set(options) <= {"include_usage"}:
        raise ApiError("stream_options may hold include_usage alone", "stream_options")
    limits = [_whole(given.pop(name), name) for name in ("max_tokens", "max_completion_tokens") if name in given]
    request = ChatRequest(
        messages=messages,
        tools=tools,
        reads_calls=bool(tools) and given.get("tool_choice") != "none",
        max_tokens=min(limits, default=None),
        stop=_stops(given.pop("stop", [])),
        stream=_flag(given, "stream"),
        include_usage=_flag(dict(options), "include_usage"),
        digest=digest,
    )
    _check_sampling(given, rules)
    _check_rest(given)
    return request


def _fields(body: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(body)
        is_deep = nests_deeply(fields)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is no JSON ({type(error).__name__})") from error
    if not isinstance(fields, dict):
        raise ApiError("the body must be a JSON object")
    if is_deep:
        raise ApiError("the body is nested too deeply")
    return fields


def _whole(value: Any, name: str) -> int:
    if type(value) is not int or value < 1:
        raise ApiError(f"{name} must be a whole number from 1 on", name)
    return value


def _flag(given: dict[str, Any], name: str) -> bool:
    value = given.pop(name, False)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise ApiError(f"{name} must be true or false", name)
    return value


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > _MOST_STOPS or not all(isinstance(s, str) and s for s in stops):
        raise ApiError(f"stop must be a text, or a list of up to {_MOST_STOPS}", "stop")
    return tuple(stops)


def _check_sampling(given: dict[str, Any], rules: Rules) -> None:
    """Check that a request samples as the run does: the losses know the log-probs of that distribution alone."""
    for name in _SAMPLING:
        if name not in given:
            continue
        value = given.pop(name)
        if type(value) not in (int, float) or not abs(value) <= sys.float_info.max:  # NaN is not, either
            raise ApiError(f"{name} must be a number", name)
        usual = getattr(rules.usual, name)
        if not rules.overrides and value not in (usual, getattr(rules.sampling, name)):
            raise ApiError(
                f"{name}={value:g}: the run samples with {usual:g}, and can learn from that alone; leave {name} out, "
                "or let the run set environment.agent_sampling=override, which ignores how requests want to sample",
                name,
                "unsupported_value",
            )


def _check_rest(given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if name in _WITHOUT_EFFECT or value in _NEUTRAL.get(name, ()):
            continue
        known = name in _NEUTRAL
        code = "unsupported_value" if known else "unsupported_parameter"
        values = " or ".join(json.dumps(one) for one in _NEUTRAL.get(name, ()))
        problem = f"must be {values}, or left out" if known else "this endpoint does not support it"
        raise ApiError(f"{name}: {problem}", name, code)
