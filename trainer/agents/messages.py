"""Messages, replies and errors as the chat API has them, and messages as text of the conversation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.environments.base import Message
from trainer.environments.tools import ToolCall, normal_arguments, split_calls


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
        """Return the body of the answer."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_FIELDS = {
    "system": {"role", "content"},
    "user": {"role", "content"},
    "assistant": {"role", "content", "tool_calls", "annotations"},
    "tool": {"role", "content", "tool_call_id", "name"},
}


@dataclass(frozen=True)
class ChatMessage:
    """A message of a request, or a reply as it is returned."""

    role: str
    content: str
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    """Of the call that the answer of a tool belongs to."""

    @property
    def message(self) -> Message:
        """The message as a chat template gets it: calls are text."""
        return {"role": self.role, "content": "\n".join(filter(None, [self.content, *map(str, self.calls)]))}

    @property
    def message_with_calls(self) -> Message:
        """The message as a renderer gets it, or a template that describes tools: calls are written in their format."""
        message: Message = {"role": self.role, "content": self.content}
        if self.calls:
            message["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": json.loads(call.arguments)}}
                for call in self.calls
            ]
        return message | ({"tool_call_id": self.call_id} if self.call_id else {})

    @property
    def identity(self) -> str:
        """Text that is the same for a reply and for what agents make of it: blanks around its content do not count."""
        calls = [[call.name, json.loads(call.arguments)] for call in self.calls]
        return json.dumps([self.role, self.content.strip(), calls], sort_keys=True)


def parse_messages(value: Any) -> list[ChatMessage]:
    """Return the messages of a request.

    Raises:
        ApiError: they are not what a chat of text consists of.
    """
    if not isinstance(value, list) or not value:
        raise ApiError("messages must be a list that is not empty", "messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(value)]


def _message(value: Any, where: str) -> ChatMessage:
    if not isinstance(value, Mapping):
        raise ApiError(f"{where} must be an object", where)
    role = _ROLES.get(value["role"]) if isinstance(value.get("role"), str) else None
    if role is None:
        raise ApiError(f"{where}.role must be one of {', '.join(_ROLES)}", f"{where}.role")
    unknown = [name for name, item in value.items() if name not in _FIELDS[role] and item is not None]
    if unknown:
        field = f"{where}.{unknown[0]}"
        raise ApiError(f"{field}: this endpoint does not read it in a message of the role {value['role']}", field)
    calls = _calls(value.get("tool_calls") or [], f"{where}.tool_calls")
    content = _content(value.get("content"), f"{where}.content", may_lack=role == "assistant")
    call_id = value.get("tool_call_id") or ""
    if not isinstance(call_id, str):
        raise ApiError(f"{where}.tool_call_id must be text", f"{where}.tool_call_id")
    return ChatMessage(role, content, calls, call_id)


def _content(value: Any, where: str, may_lack: bool) -> str:
    if value is None and may_lack:
        return ""
    if isinstance(value, list):
        for i, part in enumerate(value):
            is_text = isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
            if not is_text:
                raise ApiError(f"{where}[{i}] must be a part of the type text", f"{where}[{i}]")
        value = "".join(part["text"] for part in value)
    if not isinstance(value, str):
        raise ApiError(f"{where} must be text", where)
    _check_text(value, where)
    return value


def _check_text(value: str, where: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ApiError(f"{where} has half of a surrogate pair, which has no tokens", where) from error


def _calls(value: Any, where: str) -> tuple[ToolCall, ...]:
    if not isinstance(value, list):
        raise ApiError(f"{where} must be a list", where)
    return tuple(_call(call, f"{where}[{i}]") for i, call in enumerate(value))


def _call(value: Any, where: str) -> ToolCall:
    function = value.get("function") if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or value.get("type", "function") != "function":
        raise ApiError(f"{where} must be a call of a function", where)
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or not isinstance(arguments, str):
        raise ApiError(f"{where}.function must have name and arguments, both text", f"{where}.function")
    _check_text(name, f"{where}.function.name")
    parsed = normal_arguments(arguments or "{}")
    if parsed is None:
        field = f"{where}.function.arguments"
        raise ApiError(f"{field} must be a JSON object", field)
    given = value.get("id")
    return ToolCall(name, parsed, given if isinstance(given, str) else "")


def read_reply(text: str, reads_calls: bool) -> ChatMessage:
    """Return what the policy has said as a message.

    Calls of tools have the format of `ToolEnvironment`. If one of them cannot be read, all of the text is content.
    """
    if not reads_calls:
        return ChatMessage("assistant", text)
    content, calls = split_calls(text)
    return ChatMessage("assistant", content, calls)


def parse_tools(value: Any) -> tuple[dict[str, Any], ...]:
    """Return the tools of a request, as JSON schemas.

    Raises:
        ApiError: one of them is no function.
    """
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ApiError("tools must be a list", "tools")
    return tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(value))


def _tool(value: Any, where: str) -> dict[str, Any]:
    function = value.get("function") if isinstance(value, Mapping) else None
    if (
        not isinstance(function, Mapping)
        or value.get("type") != "function"
        or not isinstance(function.get("name"), str)
    ):
        raise ApiError(f"{where} must be a function with a name", where)
    _check_text(json.dumps(function, ensure_ascii=False), where)
    # `strict` would be a promise about the arguments.
    return {"type": "function", "function": {name: item for name, item in function.items() if name != "strict"}}
