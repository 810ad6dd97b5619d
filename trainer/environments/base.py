"""The protocol of an environment, which answers the policy in chat messages."""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from trainer.errors import UserError
from trainer.import_utils import import_function, is_agent, problem_of_method, user_code

Message = dict[str, Any]
"""A chat message: `role` and `content`, both text; what else it holds is for the chat template."""


@dataclass(frozen=True)
class StepResult:
    """The environment's answer to a reply of the policy."""

    messages: Sequence[Message] = field(default_factory=tuple)
    """What the policy sees next. May be empty if the episode is done."""
    reward: float = 0.0
    """Of this reply. The reward of an episode is the sum over its steps."""
    done: bool = False
    """The episode ends here."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Named terms of the reward of this reply. They are added to `reward`."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Other numbers of this reply, to be logged. Those of an episode are the sums over its steps."""
    player: str = ""
    """With several players: who gets `messages`, and replies next. The first messages of a player begin its chat."""
    player_rewards: Mapping[str, float] = field(default_factory=dict)
    """With several players: further rewards, by player. `reward` and `rewards` are of the player that has replied."""


METHODS = {"reset": ("row", "seed"), "step": ("reply",), "close": ()}
"""The methods of an environment, and what they get."""
_STATE_METHODS = {"save": (), "load": ("state",)}
"""Methods that an environment may have besides: both, or none."""
_MORE = {"reset": ("step_id",), "step": ("step_id", "recorded")}
"""Parameters that methods may have besides (see `more_of`)."""
_AGENT_METHODS = {"run": ("row", "seed", "endpoint")}


class Environment(Protocol):
    """What answers the policy in one episode. It is made for each episode, in a process of the sandbox.

    Its answers must be a function of row, seed and replies: an environment that is lost is made again, and gets the
    same replies. One that has `save() -> bytes` and `load(state: bytes)` need not: it saves itself after each step, and
    a new one loads that. `reset` and `step` may have more parameters (see `more_of`).

    Each method may be `async`; then a process runs many environments at the same time. So it does where the class has
    an attribute `thread_safe = True`, or a class method of that name that says so of `environment.kwargs`: methods run
    in threads, one call of an environment at a time.

    A class with an attribute `players`, a tuple of names, lets the policy play against itself. Each player has a chat
    of its own, which gives a sample with the player's reward.
    """

    def reset(
        self, row: Mapping[str, Any], seed: int
    ) -> Sequence[Message] | StepResult | Awaitable[Sequence[Message] | StepResult]:
        """Begin the episode, and return the first messages; with players, those of the first one, or a `StepResult`.

        Args:
            row: the whole row of the data.
            seed: for what the environment draws. Episodes of one prompt in a step have the same seed.
        """
        ...

    def step(self, reply: Message) -> StepResult | Awaitable[StepResult]:
        """Return the answer to a reply of the policy, a message of the role `assistant`."""
        ...

    def close(self) -> None | Awaitable[None]:
        """Release what the environment holds. Called once, at the end."""
        ...


def players_of(kind: Any) -> tuple[str, ...]:
    """Return the players that the class of an environment or an agent names; empty: there is one, without a name.

    Raises:
        ValueError: the names are none.
    """
    players = getattr(kind, "players", ())
    is_valid = isinstance(players, tuple) and len(set(players)) == len(players)
    if not is_valid or not all(isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9_-]+", name) for name in players):
        raise ValueError(f"players must be a tuple of different names of letters, digits, _ and -, not {players!r:.80}")
    return players


def more_of(method: str, function: Callable[..., Any]) -> list[str]:
    """Return which parameters a method of an environment has besides those that it must have.

    `step_id`, of `reset` and `step`, gets an id of the call: the same for the same episode and replies, also after a
    kill, so that a service can refuse what it has done already. `recorded`, of `step`, gets the `StepResult` that the
    same replies had before a kill; None: it is not known.
    """
    try:
        return [name for name in _MORE.get(method, ()) if name in inspect.signature(function).parameters]
    except ValueError:  # some functions in C have no signature
        return []


def problem_of_state(kind: Any) -> str | None:
    """Return why `save` and `load` of an environment, or of its class, are not what it may have; None: they are.

    They are common names: an environment with methods for another purpose must not seem to save itself.
    """
    found = [method for method in _STATE_METHODS if callable(getattr(kind, method, None))]
    for method in found:
        signature = inspect.signature(getattr(kind, method))
        kinds = {one.kind for one in signature.parameters.values()}
        if kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:  # a decorator may pass them on
            continue
        if tuple(name for name in signature.parameters if name != "self") != _STATE_METHODS[method]:
            return (
                f"the class has a method {method}{signature}, but an environment that saves its state has save(self) "
                "-> bytes and load(self, state: bytes) (docs/environments.md); rename it, or write these two"
            )
    lacking = [method for method in _STATE_METHODS if method not in found]
    return f"the class can save or load its state alone; write `{lacking[0]}`, too" if len(lacking) == 1 else None


def find_environment(name: str) -> Callable[..., Environment]:
    """Return the class, or the function that makes an environment, at the import path `environment.name`.

    The class of an agent is returned, too (see `is_agent`).

    Raises:
        UserError: it cannot be imported, the class lacks a method, or a method does not take what it gets.
    """
    kind = import_function(name, "environment.name")
    agent = is_agent(kind)
    missing = [] if agent else [method for method in METHODS if inspect.isclass(kind) and not hasattr(kind, method)]
    if missing:
        raise UserError(
            f"environment.name={name}: the class has no method `{missing[0]}`; an environment has the methods "
            f"{', '.join(METHODS)} (docs/environments.md), and an agent has `run` alone (docs/agents.md)"
        )
    if not agent and inspect.isclass(kind) and (problem := problem_of_state(kind)):
        raise UserError(f"environment.name={name}: {problem}")
    for method, arguments in (_AGENT_METHODS if agent else METHODS).items():
        more = more_of(method, getattr(kind, method, len))
        if problem := problem_of_method(kind, method, (*arguments, *more)):
            raise UserError(f"environment.name={name}: {problem}")
    try:
        players_of(kind)
    except ValueError as error:
        raise UserError(f"environment.name={name}: {error}") from error
    return kind


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Check that the environment `name` can be imported, and takes the options.

    A class may have a class method `check_options`, which gets them and raises for those that cannot work.

    Raises:
        UserError: it cannot, or does not.
    """
    kind = find_environment(name)
    try:
        inspect.signature(kind).bind(**options)
    except TypeError as error:
        taken = ", ".join(one for one in inspect.signature(kind).parameters) or "nothing"
        raise UserError(
            f"environment.kwargs: {name}: {error}; it takes {taken}, set by +environment.kwargs.NAME=VALUE"
        ) from error
    except ValueError:  # some functions in C have no signature
        pass
    if hasattr(kind, "check_options"):
        with user_code(f"environment.kwargs: {name}: {{}}"):
            kind.check_options(**options)


def side_model(model: str) -> str:
    """Return the name under which the policy `model` answers requests that are not a part of the task."""
    return f"{model}-side"


def player_model(model: str, player: str) -> str:
    """Return the name under which a player asks the policy `model`."""
    return f"{model}:{player}" if player else model


@dataclass(frozen=True)
class Endpoint:
    """Where one episode of an agent reaches the policy, with any client of OpenAI or Anthropic, in any process."""

    base_url: str
    """A secret address of this episode: who knows it speaks for the agent. It ends with the episode."""
    api_key: str
    """For clients that want one. The endpoint accepts any key."""
    model: str
    """Name of the policy in requests; that of a player is `<model>:<player>`."""
    episode_id: str = ""
    """The same for the same episode after a kill, so that a service can refuse what it has done already."""

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables of a process, from which clients of OpenAI and Anthropic take address and key.

        The last three keep Claude Code from asking the policy for what is not a part of the task, or from letting it
        be trained, and from a first line that differs from task to task.
        """
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": self.api_key,
            "ANTHROPIC_SMALL_FAST_MODEL": side_model(self.model),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        }


@dataclass(frozen=True)
class AgentResult:
    """What an agent returns at the end of its episode."""

    reward: float = 0.0
    """Of the episode."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Named terms of the reward. They are added to `reward`."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Other numbers of the episode, to be logged."""
    player_rewards: Mapping[str, float] = field(default_factory=dict)
    """With several players: further rewards, by player. `reward` and `rewards` are of every player."""


class Agent(Protocol):
    """A program that runs one episode. It is made for each episode, in a process of the sandbox."""

    def run(
        self, row: Mapping[str, Any], seed: int, endpoint: Endpoint
    ) -> AgentResult | float | Awaitable[AgentResult | float]:
        """Run the episode; return its reward.

        May be `async`. Otherwise it runs in a thread, beside the agents of other episodes.

        Args:
            row: the whole row of the data.
            seed: for what the agent draws. Episodes of one prompt in a step have the same seed.
            endpoint: the policy.
        """
        ...
