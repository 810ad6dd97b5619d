"""Requests for a reply: one value for all APIs of the endpoint, and the checks that they have in common."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import xxhash

from trainer.agents.messages import ApiError, ChatMessage
from trainer.environments.base import player_model, side_model
from trainer.files.documents import nests_deeply
from trainer.generation.engine import Sampling

if TYPE_CHECKING:
    from trainer.agents.call_tree import Answer

LOG = logging.getLogger(__name__)

OF_OPENAI = frozenset(
    {"metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier", "store", "user"}
)
"""Fields of both APIs of OpenAI that change no token."""
_SAMPLING = ("temperature", "top_p", "top_k")
_MOST_STOPS = 4
_OF_THE_CONNECTION = ("stream", "stream_options")
"""Fields of a request that a client may change when it repeats it."""


@dataclass(frozen=True)
class ChatRequest:
    """A request for a reply to a chat."""

    messages: list[ChatMessage]
    tools: tuple[dict[str, Any], ...]
    max_tokens: int | None  # None: as many as the run allows
    reads_calls: bool = False  # calls of tools in the reply are told from its text
    stop: tuple[str, ...] = ()  # texts that end a reply
    stream: bool = False
    include_usage: bool = False  # a streamed answer of the chat API ends with the number of tokens
    is_side: bool = False
    """Not a part of the task, such as a title: the reply is sampled and not trained."""
    player: str = ""  # who of the agent's players asks
    digest: str = ""
    """Of all fields but those of the connection. A request that is repeated has the same."""


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
        players: that the agent names; empty: there is one, without a name.
    """

    model: str
    sampling: Sampling
    usual: Sampling
    overrides: bool
    max_turns: int
    max_tokens: int | None = None
    players: tuple[str, ...] = ()

    @property
    def models(self) -> dict[str, str]:
        """The player of each model that requests may name."""
        return {player_model(self.model, player): player for player in self.players or ("",)}


class Wire(Protocol):
    """An API of the endpoint, for one episode."""

    without_effect: frozenset[str]  # fields that change no token: the run draws with its own seeds
    neutral: Mapping[str, tuple[Any, ...]]
    """Fields that the endpoint accepts with these values alone."""

    def read(self, given: dict[str, Any], rules: Rules, digest: str) -> ChatRequest:
        """Return the request of these fields, without those of the connection, and take out what it has read.

        Raises:
            ApiError: a field cannot be read.
        """
        ...

    def whole(self, answer: Answer) -> dict[str, Any]:
        """Return an answer as one object."""
        ...

    def start(self, answer: Answer) -> bytes:
        """Return the beginning of a stream. The reply need not be there."""
        ...

    def wait(self, answer: Answer, number: int) -> bytes:
        """Return sign `number`, from 0, that a reply is under way. Clients know it; it adds nothing to the reply."""
        ...

    def events(self, answer: Answer, waits: int) -> Iterator[bytes]:
        """Yield the events of a reply, behind the beginning of the stream and `waits` signs of `wait`."""
        ...


def parse_request(body: bytes, rules: Rules, wire: Wire) -> ChatRequest:
    """Return the request that a body holds.

    Raises:
        ApiError: it is no JSON, or has a field that the endpoint does not support.
    """
    try:
        fields = json.loads(body)
        is_deep = nests_deeply(fields)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is no JSON ({type(error).__name__})") from error
    if not isinstance(fields, dict):
        raise ApiError("the body must be a JSON object")
    if is_deep:
        raise ApiError("the body is nested too deeply")
    own = {name: value for name, value in fields.items() if name not in _OF_THE_CONNECTION}
    digest = xxhash.xxh3_128_hexdigest(json.dumps(own, sort_keys=True).encode())
    given = {name: value for name, value in fields.items() if value is not None}
    model = given.pop("model", None)
    is_side_model = model == side_model(rules.model)
    if not is_side_model and (not isinstance(model, str) or model not in rules.models):
        problem = "the request names no model" if model is None else f"there is no model {model!r:.100}"
        called = " or ".join(rules.models)
        raise ApiError(f"{problem}; the policy is called {called}", "model", "model_not_found")
    request = wire.read(given, rules, digest)
    stream, reads_calls = take_flag(given, "stream"), _take_tool_choice(given, rules) and bool(request.tools)
    _check_sampling(given, rules)
    for name, value in given.items():
        known = wire.neutral.get(name, ())
        if name in wire.without_effect or value in known:
            continue
        code = "unsupported_value" if known else "unsupported_parameter"
        values = " or ".join(json.dumps(one) for one in known)
        problem = f"must be {values}, or left out" if known else "this endpoint does not support it"
        raise ApiError(f"{name}: {problem}", name, code)
    return dataclasses.replace(
        request,
        stream=stream,
        is_side=request.is_side or is_side_model,
        digest=digest,
        player=rules.models.get(str(model), ""),
        reads_calls=reads_calls,
    )


def take_limit(given: dict[str, Any], *names: str) -> int | None:
    """Take the most tokens of a reply out of a request; None: it does not say."""
    limits = {name: given.pop(name) for name in names if name in given}
    for name, value in limits.items():
        if type(value) is not int or value < 1:
            raise ApiError(f"{name} must be a whole number from 1 on", name)
    return min(limits.values(), default=None)


def take_flag(given: dict[str, Any], name: str) -> bool:
    """Take a field that is true or false out of a request."""
    value = given.pop(name, None)
    if value is not None and not isinstance(value, bool):
        raise ApiError(f"{name} must be true or false", name)
    return bool(value)


def take_stops(given: dict[str, Any], name: str) -> tuple[str, ...]:
    """Take the texts that end a reply out of a request."""
    value = given.pop(name, [])
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > _MOST_STOPS or not all(isinstance(s, str) and s for s in stops):
        raise ApiError(f"{name} must be a text, or a list of up to {_MOST_STOPS}", name)
    return tuple(stops)


def _take_tool_choice(given: dict[str, Any], rules: Rules) -> bool:
    """Take the choice of tools out of a request; return whether calls are read from the reply.

    A choice that would force a call is ignored under `environment.agent_sampling=override`, like temperatures: the
    policy is sampled as it is.
    """
    value = given.pop("tool_choice", "auto")
    choice = value.get("type") if isinstance(value, Mapping) else value
    if choice not in ("auto", "none") and not rules.overrides:
        raise ApiError(
            "tool_choice must be auto or none, or left out: the run can learn from what the policy writes by itself "
            "alone; or let the run set environment.agent_sampling=override, which ignores it",
            "tool_choice",
            "unsupported_value",
        )
    return choice != "none"


@functools.cache
def note_once(text: str) -> None:
    """Log a line the first time that a job has it."""
    LOG.info("agents: %s", text)


def note_thinking(name: str) -> None:
    """Say that a field about thinking has no effect."""
    note_once(f"{name} of requests does not count: the policy thinks as its chat template lets it")


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
