"""What an environment process does: it runs many environments, and answers calls of their methods."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from trainer.environments.base import Step
from trainer.errors import describe_error
from trainer.files.documents import nests_deeply
from trainer.import_utils import import_function
from trainer.rewards.parsing import read_number, read_terms
from trainer.sandbox.reaper import send

RESERVED = frozenset(("turns", "tokens"))
"""Names of `episode/<name>/mean` that no metric of an environment may have."""
BEGUN = "begun"
"""The answer to a call before it is made: it has been read, and its time runs."""
_MOST_MESSAGES = 1024
_MOST_EXTRAS = 1 << 20
"""Characters of all that messages hold besides their contents, as JSON."""


def largest_message(most_characters: int) -> int:
    """Return the number of bytes of the largest answer of a process: in JSON a character takes up to 12."""
    return 12 * most_characters + 2 * _MOST_EXTRAS


def serve(pipe: Connection, name: str, options: dict[str, Any], timeout_s: float, most_characters: int) -> NoReturn:
    """Answer each `[environment, method, *arguments]` with `[environment, BEGUN]`, then `[environment, result]`.

    Methods are `start` (with row and seed), `step` (with a message) and `close`. An environment is a number. A result
    is an object: the fields of a `Step`, or `failed` with the reason and `timeout`.
    """
    try:
        kind = import_function(name, "environment.name")
    except BaseException as error:
        send(pipe, {"cannot_start": describe_error(error)})
        os._exit(1)
    methods = (getattr(kind, method, None) for method in ("start", "step", "close"))
    send(pipe, {"ready": True, "concurrent": any(map(inspect.iscoroutinefunction, methods))})
    asyncio.run(_Server(pipe, lambda: kind(**options), timeout_s, most_characters).run())
    os._exit(0)


class _Server:
    def __init__(self, pipe: Connection, make: Callable[[], Any], timeout_s: float, most_characters: int):
        self._pipe = pipe
        self._make = make
        self._timeout_s = timeout_s
        self._most_characters = most_characters
        self._environments: dict[int, Any] = {}
        self._calls: set[asyncio.Task[None]] = set()
        self._process = os.getpid()

    async def run(self) -> None:
        asyncio.get_running_loop().add_reader(self._pipe.fileno(), self._read)
        await asyncio.Event().wait()

    def _read(self) -> None:
        try:
            number, method, *arguments = json.loads(self._pipe.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)
        call = asyncio.get_running_loop().create_task(self._answer(number, method, arguments))
        self._calls.add(call)  # the loop itself holds no strong reference
        call.add_done_callback(self._calls.discard)

    async def _answer(self, number: int, method: str, arguments: list[Any]) -> None:
        send(self._pipe, [number, BEGUN])
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                result = await self._call(number, method, arguments)
        except BaseException as error:  # also SystemExit: whatever user code raises
            late = limit.expired()
            reason = f"took longer than environment.timeout_s={self._timeout_s:g}" if late else describe_error(error)
            result = {"failed": f"{method} {reason if late else f'raised {reason}'}", "timeout": late}
        if os.getpid() != self._process:  # user code has forked, and this is its child
            os._exit(0)
        send(self._pipe, [number, result])

    async def _call(self, number: int, method: str, arguments: list[Any]) -> dict[str, Any]:
        if method == "close":
            await self._close(number)
            return {}
        if method == "start":
            with contextlib.suppress(Exception):  # the one before has failed, and this one takes its place
                await self._close(number)
            self._environments[number] = self._make()
        value = getattr(self._environments[number], method)(*arguments)
        if inspect.isawaitable(value):
            value = await value
        result = _step(value if method == "step" else Step(_messages(value)))
        _cut(result["messages"], self._most_characters)
        return result

    async def _close(self, number: int) -> None:
        environment = self._environments.pop(number, None)
        if environment is not None:
            value = environment.close()
            if inspect.isawaitable(value):
                await value


def _step(value: Any) -> dict[str, Any]:
    if not all(hasattr(value, name) for name in ("messages", "reward", "done")):
        raise TypeError(f"a step must be a trainer.environments.Step, not {type(value).__name__}")
    done = bool(value.done)
    numbers = {
        "reward": read_number(value.reward),
        "rewards": read_terms(getattr(value, "rewards", {})),
        "metrics": read_terms(getattr(value, "metrics", {}), paths=True),
    }
    for name, found in numbers.items():
        if isinstance(found, str):
            raise ValueError(f"{name}: {found}")
    taken = sorted(RESERVED.intersection(numbers["metrics"]))
    if taken:
        raise ValueError(f"metrics: {taken[0]} is counted for every environment; choose another name")
    return {"messages": _messages(value.messages, may_be_empty=done), **numbers, "done": done}


def _messages(value: Any, may_be_empty: bool = False) -> list[dict[str, Any]]:
    """Return chat messages as JSON knows them.

    Raises:
        TypeError, ValueError: they are none.
    """
    if not isinstance(value, (list, tuple)) or not all(isinstance(message, Mapping) for message in value):
        raise TypeError(f"messages must be a list of dicts with role and content, not {value!r:.80}")
    if not value and not may_be_empty:
        raise ValueError("there is no message, and the episode is not done")
    if len(value) > _MOST_MESSAGES:
        raise ValueError(f"there are {len(value)} messages; a step has at most {_MOST_MESSAGES}")
    for message in value:
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise TypeError(f"a message must have a text {key}: {message!r:.80}")
            message[key].encode()  # half of a surrogate pair has no tokens
    text = json.dumps([{**message, "content": ""} for message in value])
    if len(text) > _MOST_EXTRAS:
        raise ValueError(f"the messages hold {len(text)} characters besides their contents; the most is {_MOST_EXTRAS}")
    messages = json.loads(text)
    if nests_deeply(messages):
        raise ValueError("the messages are nested too deeply")
    return [{**message, "content": str(given["content"])} for message, given in zip(messages, value, strict=True)]


def _cut(messages: list[dict[str, Any]], most_characters: int) -> None:
    """Cut the contents behind so many characters, and say how many are left out.

    The policy never sees a part of an answer: what has more characters has more tokens than a prompt may have.
    """
    left = most_characters
    for message in messages:
        content = message["content"]
        if len(content) > left:
            message["content"] = f"{content[:left]}… ({len(content) - left:,} more characters)"
        left = max(0, left - len(content))
