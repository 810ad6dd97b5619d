"""Messages, replies and errors as all APIs of the endpoint have them, and messages as text of the conversation."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.environments.base import Message
from trainer.environments.tools import ToolCall, normal_arguments


class ApiError(Exception):
    """A request that is not answered.

    Args:
        param: the field of the request that is to blame.
        code: a name for programs.
        status: of HTTP. Clients repeat 408, 409, 429 and those from 500 on, unless a header forbids it.
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400):
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = status

    def body(self) -> dict[str, Any]:
        """Return the body of the answer, which is that of OpenAI's and of Anthropic's APIs."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "type": "error",
            "error": {"message": self.message, "type": kind, "param": self.param, "code": self.code},
        }


@dataclass(frozen=True)
class ChatMessage:
    """A message of a request, or a reply as it is returned."""

    role: str
    content: str
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""  # of the call that the answer of a tool belongs to

    @property
    def message(self) -> Message:
        """The message as a chat template gets it: calls are text."""
        return {"role": self.role, "content": "\n".join(filter(None, [self.content, *map(str, self.calls)]))}

    @property
    def message_with_calls(self) -> Message:
        """The message as a renderer gets it, or a template that describes tools: calls are written in their format.

        Templates may write the ids of calls into the answers.
        """
        message: Message = {"role": self.role, "content": self.content}
        if self.calls:
            message["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": json.loads(call.arguments)}}
                | ({"id": call.id} if call.id else {})
                for call in self.calls
            ]
        return message | ({"tool_call_id": self.call_id} if self.call_id else {})

    @property
    def identity(self) -> str:
        """Text that is the same for a reply and for what agents make of it.

        Thoughts and blanks around the content do not count. Numbers are doubles: JavaScript writes 1.0 as 1.
        """
        calls = [[call.name, json.loads(call.arguments, parse_int=_double)] for call in self.calls]
        content = split_thoughts(self.content)[1] if self.role == "assistant" else self.content
        return json.dumps([self.role, content.strip(), calls], sort_keys=True)


def _double(digits: str) -> float | str:
    number = float(digits)
    return number if math.isfinite(number) else digits


def split_thoughts(text: str) -> tuple[str, str]:
    """Return what a reply has up to `</think>`, and the rest; all of it is rest if it has no such mark."""
    thoughts, mark, rest = text.rpartition("</think>")
    return (thoughts.replace("<think>", "", 1).strip(), rest) if mark else ("", text)


def in_order(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return messages in an order that chat templates render: one system message, the first, then others in turn.

    Later system messages become the user's. Neighbours of one role become one message, but for answers of tools.
    """
    ordered: list[ChatMessage] = []
    for message in messages:
        if message.role == "system" and any(one.role != "system" for one in ordered):
            message = dataclasses.replace(message, role="user")
        last = ordered[-1] if ordered else None
        if last is not None and last.role == message.role != "tool":
            content = "\n".join(filter(None, [last.content, message.content]))
            ordered[-1] = dataclasses.replace(last, content=content, calls=last.calls + message.calls)
        else:
            ordered.append(message)
    return ordered


def read_text(value: Any, where: str, kinds: Sequence[str], between: str = "") -> str:
    """Return a text, or the texts of a list of parts, joined.

    Args:
        kinds: types of parts that are text.

    Raises:
        ApiError: it is something else, or has no tokens.
    """
    if isinstance(value, list):
        for i, part in enumerate(value):
            is_text = isinstance(part, Mapping) and part.get("type") in kinds and isinstance(part.get("text"), str)
            if not is_text:
                raise ApiError(f"{where}[{i}] must be a part of the type {' or '.join(kinds)}", f"{where}[{i}]")
        value = between.join(part["text"] for part in value)
    if not isinstance(value, str):
        raise ApiError(f"{where} must be text", where)
    _check_text(value, where)
    return value


def _check_text(value: str, where: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ApiError(f"{where} has half of a surrogate pair, which has no tokens", where) from error


def read_call(name: Any, arguments: Any, call_id: Any, where: str) -> ToolCall:
    """Return a call of a tool. Its arguments are JSON, as text.

    Raises:
        ApiError: it has no name, or its arguments are no object.
    """
    if not isinstance(name, str) or not isinstance(arguments, str):
        raise ApiError(f"{where} must have name and arguments, both text", where)
    _check_text(name, f"{where}.name")
    parsed = normal_arguments(arguments or "{}")
    if parsed is None:
        raise ApiError(f"{where}.arguments must be a JSON object", f"{where}.arguments")
    return ToolCall(name, parsed, call_id if isinstance(call_id, str) else "")


def read_tools(
    value: Any, function_of: Callable[[Mapping[str, Any], str], Mapping[str, Any] | None]
) -> tuple[dict[str, Any], ...]:
    """Return the tools of a request, as JSON schemas. `strict`, a promise about the arguments, does not count.

    Args:
        function_of: returns `name`, `description` and `parameters` of a tool; None: it is left out.

    Raises:
        ApiError: one of them is no function, or has no name.
    """
    if not isinstance(value, list):
        raise ApiError("tools must be a list", "tools")
    tools = []
    for i, tool in enumerate(value):
        where = f"tools[{i}]"
        if not isinstance(tool, Mapping):
            raise ApiError(f"{where} must be an object", where)
        if (function := function_of(tool, where)) is None:
            continue
        if not isinstance(function.get("name"), str):
            raise ApiError(f"{where} must be a function with a name", where)
        _check_text(json.dumps(function, ensure_ascii=False), where)
        tools.append({"type": "function", "function": {key: function[key] for key in function if key != "strict"}})
    return tuple(tools)


def event(kind: str, **fields: Any) -> bytes:
    """Return a server-sent event of Anthropic's API, or of OpenAI's API of responses."""
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()
