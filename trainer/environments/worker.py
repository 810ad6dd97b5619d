"""Environments and agents in their process: their methods are called, and their answers checked."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import inspect
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from trainer.environments.base import (
    METHODS,
    AgentResult,
    Endpoint,
    StepResult,
    find_environment,
    more_of,
    players_of,
    problem_of_state,
)
from trainer.errors import one_line
from trainer.files.documents import nests_deeply
from trainer.import_utils import is_agent
from trainer.rewards.parsing import read_number, read_terms
from trainer.sandbox.limits import MAX_MESSAGE_EXTRAS, MAX_MESSAGES, MAX_STATE
from trainer.sandbox.worker import Handler, UserThreads, line_of

RESERVED = frozenset(("turns", "tokens"))
"""Names of `episode/<name>/mean` that no metric of an environment may have."""


def largest_message(most_characters: int) -> int:
    """Return the number of bytes of the largest answer of a process: in JSON a character takes up to 12."""
    return 12 * most_characters + 2 * MAX_MESSAGE_EXTRAS + 2 * MAX_STATE


def reach_without_proxy(*hosts: str) -> None:
    """Let clients of this process, and of those that it starts, reach hosts without the proxies of the environment."""
    for name in ("NO_PROXY", "no_proxy"):
        known = os.environ.get(name, "").split(",")
        os.environ[name] = ",".join(dict.fromkeys(filter(None, [*known, *hosts])))


WRONG_VALUE = "returned a wrong value"
"""The beginning of the reason why a call has failed, if its method has returned what it must not."""


class WrongValueError(Exception):
    """A method of the user has returned what it must not."""


@contextlib.contextmanager
def checks_value(method: Callable[..., Any]) -> Iterator[None]:
    """Check in the block what the method of a user has returned: what the block raises says what is wrong with it.

    Raises:
        WrongValueError: names the method's file and line, too.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        code = getattr(inspect.unwrap(getattr(method, "__func__", method)), "__code__", None)
        at = f" (in {one_line(os.path.basename(code.co_filename))}:{code.co_firstlineno})" if code else ""
        raise WrongValueError(f"{WRONG_VALUE}{at}: {one_line(str(error))}") from error


class _NotMadeError(Exception):
    """The class of the user has raised, its cause, when it was to make an object."""


class EnvironmentHandler(Handler):
    """Makes the calls `[number, method, *arguments]` of environments and agents. Each episode has a number.

    The methods of an environment are `reset` (with row, seed and an id), `step` (with a message, an id, and the fields
    of the `StepResult` that is known), `load` (with what `save` has returned) and `close`. The first two return the
    fields of a `StepResult`, and what the environment has saved. The method of an agent is `run` (with row, seed and
    the fields of an `Endpoint`), which returns the fields of an `AgentResult`. Methods that are not `async` run in a
    thread: several at a time for agents, and for environments whose class is `thread_safe`.
    """

    def __init__(self, name: str, options: dict[str, Any], timeout_s: float, most_characters: int):
        self._kind = kind = find_environment(name)
        self._options = options
        self._players = players_of(kind)
        own = [base for base in getattr(kind, "__mro__", ()) if not base.__module__.startswith("trainer.")]
        codes = [getattr(value, "__code__", None) for base in own for value in vars(base).values()]
        self._files = {code.co_filename for code in codes if code is not None}  # of the user
        self._is_agent = is_safe = is_agent(kind)
        if self._is_agent:
            reach_without_proxy("127.0.0.1", "localhost")
        else:
            is_safe = getattr(kind, "thread_safe", False)
            is_safe = is_safe(**options) if callable(is_safe) else bool(is_safe)
        methods = (getattr(kind, method, None) for method in METHODS)
        self._threads = UserThreads("environment", several=is_safe)
        self.is_concurrent = is_safe or any(map(inspect.iscoroutinefunction, methods))
        self._timeout_s = timeout_s
        self._most_characters = most_characters
        self._environments: dict[int, Any] = {}

    def is_async(self, call: list[Any]) -> bool:
        return True

    def limit_s(self, call: list[Any]) -> float | None:
        return None if self._is_agent else self._timeout_s  # the time of the policy must not count

    def describe(self, error: BaseException, call: list[Any]) -> str:
        if isinstance(error, _NotMadeError) and error.__cause__ is not None:
            return f"was not called, because __init__ {self.describe(error.__cause__, call)}"
        if isinstance(error, WrongValueError):
            return str(error)
        return super().describe(error, call) + line_of(error, self._files)

    async def compute(self, call: list[Any]) -> dict[str, Any]:
        number, method, *arguments = call
        if self._is_agent:
            row, seed, endpoint = arguments
            reach_without_proxy(urlsplit(endpoint["base_url"]).hostname or "")
            agent = self._make()
            value = await self._run(agent.run, row, seed, Endpoint(**endpoint))
            with checks_value(agent.run):
                return _result(value) | _player_rewards(value, self._players)
        if method == "close":
            await self._close(number)
            return {}
        if method in ("reset", "load"):
            with contextlib.suppress(Exception):  # the one before has failed, and this one takes its place
                await self._close(number)
            self._environments[number] = await self._run(self._make)
        environment = self._environments[number]
        try:
            return await self._ask(environment, method, arguments)
        except asyncio.CancelledError:  # perhaps a thread still has it
            self._environments.pop(number, None)
            raise

    async def _ask(self, environment: Any, method: str, arguments: list[Any]) -> dict[str, Any]:
        """Return the answer of an environment, and its state after it if it can save itself."""
        function = getattr(environment, method)
        if method == "load":
            await self._run(function, base64.b64decode(arguments[0]))
            return {}
        count = len(METHODS[method])
        given = dict(zip(("step_id", "recorded"), arguments[count:], strict=False))
        if known := given.get("recorded"):
            is_cut = sum(len(message["content"]) for message in known["messages"]) > self._most_characters
            given["recorded"] = None if is_cut else StepResult(**known)
        more = {name: given[name] for name in more_of(method, function)}
        value = await self._run(partial(function, **more) if more else function, *arguments[:count])
        with checks_value(function):
            if method == "reset" and not (self._players and hasattr(value, "messages")):
                value = StepResult(_messages(value), player=self._players[0] if self._players else "")
            result = _step(value, self._players)
            if method == "reset" and result["done"]:
                raise ValueError("the episode is done before the policy has replied")
        # The policy never sees a part of an answer: what has more characters has more tokens than a prompt may have.
        left = self._most_characters
        for message in result["messages"]:
            content = message["content"]
            if len(content) > left:
                message["content"] = f"{content[:left]}… ({len(content) - left:,} more characters)"
            left = max(0, left - len(content))
        result["state"] = None
        if callable(getattr(environment, "save", None)) and not result["done"]:
            state = await self._run(environment.save)
            with checks_value(environment.save):
                if not isinstance(state, bytes) or len(state) > MAX_STATE:
                    raise TypeError(f"it must be at most {MAX_STATE:,} bytes, not {type(state).__name__}")
            result["state"] = base64.b64encode(state).decode()
        return result

    def _make(self) -> Any:
        try:
            made = self._kind(**self._options)
            if not self._is_agent and (problem := problem_of_state(made)):  # of what a function has made
                raise TypeError(problem)
        except BaseException as error:  # whatever user code raises
            raise _NotMadeError from error
        return made

    async def _close(self, number: int) -> None:
        environment = self._environments.pop(number, None)
        if environment is not None:
            await self._run(environment.close)

    async def _run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return what user code returns."""
        if inspect.iscoroutinefunction(function.func if isinstance(function, partial) else function):
            return await function(*arguments)
        try:
            return await self._threads.run(function, *arguments)
        except asyncio.CancelledError:
            self.must_end |= self._threads.too_many_left
            raise


def _result(value: Any) -> dict[str, Any]:
    """Return the fields of what an agent has returned.

    Raises:
        TypeError, ValueError: it is no result.
    """
    if not all(hasattr(value, name) for name in ("reward", "rewards", "metrics")):
        reward = read_number(value)
        if isinstance(reward, str):
            raise TypeError(f"it must be a trainer.environments.AgentResult or a number, not {value!r:.80}")
        value = AgentResult(reward)
    return _numbers(value, RESERVED | {"samples", "errors"}, "episode")


def _step(value: Any, players: Sequence[str]) -> dict[str, Any]:
    """Return the fields of what an environment has answered.

    Raises:
        TypeError, ValueError: it is no `StepResult`, or names other players than the class.
    """
    if not all(hasattr(value, name) for name in ("messages", "reward", "done")):
        raise TypeError(
            f"it must be a trainer.environments.StepResult(messages, reward, done), not {type(value).__name__}"
        )
    done = bool(value.done)
    if not done and value.messages in ([], ()):
        raise ValueError("there is no message, and the episode is not done; return a message, or done=True")
    numbers = _numbers(value, RESERVED, "environment")
    messages = _messages(value.messages, may_be_empty=done)
    player = getattr(value, "player", "")
    if player not in (players or ("",)) and not (done and player == ""):
        named = f"it must be one of {', '.join(players)}" if players else "the class has no attribute `players`"
        raise ValueError(f"player={player!r:.80}: {named}")
    return {"messages": messages, **numbers, "done": done, "player": player, **_player_rewards(value, players)}


def _player_rewards(value: Any, players: Sequence[str]) -> dict[str, Any]:
    rewards = read_terms(getattr(value, "player_rewards", {}))
    if isinstance(rewards, str):
        raise ValueError(f"player_rewards: {rewards}")
    if others := sorted(rewards.keys() - set(players)):
        named = f"they are {', '.join(players)}" if players else "the class has no attribute `players`"
        raise ValueError(f"player_rewards: {others[0]} is no player; {named}")
    return {"player_rewards": rewards}


def _numbers(value: Any, reserved: frozenset[str], counted: str) -> dict[str, Any]:
    """Return the fields `reward`, `rewards` and `metrics` of what user code has returned.

    Args:
        reserved: names that no metric may have, because each `counted` has them.

    Raises:
        ValueError: a number is none, or a name is reserved.
    """
    numbers = {
        "reward": read_number(value.reward, "is a"),
        "rewards": read_terms(getattr(value, "rewards", {})),
        "metrics": read_terms(getattr(value, "metrics", {}), paths=True),
    }
    for name, found in numbers.items():
        if isinstance(found, str):
            raise ValueError(f"{name} {found}" if found.startswith(("is ", "are ")) else f"{name}: {found}")
    taken = sorted(reserved.intersection(numbers["metrics"]))
    if taken:
        raise ValueError(f"metrics: {taken[0]} is counted for every {counted}; choose another name")
    return numbers


def _messages(value: Any, may_be_empty: bool = False) -> list[dict[str, Any]]:
    """Return chat messages as JSON knows them.

    Raises:
        TypeError, ValueError: they are none.
    """
    if not isinstance(value, (list, tuple)) or not all(isinstance(message, Mapping) for message in value):
        raise TypeError(f"messages must be a list of dicts with role and content, not {value!r:.80}")
    if not value and not may_be_empty:
        raise ValueError("there is no message")
    if len(value) > MAX_MESSAGES:
        raise ValueError(f"there are {len(value)} messages; a step has at most {MAX_MESSAGES}")
    for message in value:
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise TypeError(f"a message must have a text {key}: {message!r:.80}")
            message[key].encode()  # half of a surrogate pair has no tokens
    text = json.dumps([{**message, "content": ""} for message in value])
    if len(text) > MAX_MESSAGE_EXTRAS:
        raise ValueError(
            f"the messages hold {len(text)} characters besides their contents; the most is {MAX_MESSAGE_EXTRAS}"
        )
    messages = json.loads(text)
    if nests_deeply(messages):
        raise ValueError("the messages are nested too deeply")
    return [{**message, "content": str(given["content"])} for message, given in zip(messages, value, strict=True)]
