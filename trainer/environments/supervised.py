"""Chats to learn from that begin, and call tools, as the episodes of an environment do."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from trainer.environments.base import Environment, Message
from trainer.environments.tools import ToolCall, ToolEnvironment
from trainer.errors import UserError, describe_error


def supervised_chat(
    environment: Callable[..., Environment],
    row: Mapping[str, Any],
    chat: Sequence[Message],
    seed: int = 0,
    **options: Any,
) -> dict[str, list[Message]]:
    """Return a row for `trainer sft` with `data.messages_key=messages`: a chat that begins as an episode begins.

    An episode begins with what the environment's `reset` returns, such as the system message that describes the tools.
    These messages replace what the chat has before its first reply.

    Args:
        environment: the class that `environment.name` names.
        row: of the data, for the environment.
        chat: messages with replies (`assistant`) and answers of tools (`tool`). Calls in `tool_calls`, as the API of
            OpenAI has them, are written as the text that `ToolEnvironment` reads.
        seed: for what the environment draws.
        options: of the environment, as in `environment.kwargs`.

    Raises:
        UserError: the chat has no reply, or does not end with one; or a call in `tool_calls` names no tool of the
            environment, or has arguments that the tool does not take.
    """
    first = next((i for i, message in enumerate(chat) if message["role"] == "assistant"), None)
    if first is None or chat[-1]["role"] != "assistant":
        raise UserError("supervised_chat: the chat must end with a reply, a message of the role `assistant`")
    world = environment(**options)
    try:
        start = _result(world.reset(row, seed))
        replies = [_as_text(message, world) for message in chat[first:]]
    finally:
        _result(world.close())
    return {"messages": [*map(dict, start), *replies]}


def _as_text(message: Message, world: Environment) -> Message:
    """Return a message with text as its content, its calls included."""
    content = message.get("content") or ""
    content = content if isinstance(content, str) else json.dumps(content, default=str)
    calls = []
    for call in message.get("tool_calls") or []:
        function = call.get("function", call)
        arguments = function.get("arguments") or {}
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        if isinstance(world, ToolEnvironment):
            try:
                world.check_call(function["name"], arguments)
            except Exception as error:
                raise UserError(f"supervised_chat: a call of {function['name']}: {describe_error(error)}") from error
        calls.append(str(ToolCall(function["name"], json.dumps(arguments))))
    return {"role": message["role"], "content": "\n".join(filter(None, [content, *calls]))}


def _result(value: Any) -> Any:
    """Return a value, or what it yields when it is awaited, also where an event loop runs already (a notebook)."""
    if not inspect.isawaitable(value):
        return value

    async def waited(awaitable: Awaitable[Any]) -> Any:
        return await awaitable

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, waited(value)).result()
