"""Messages and replies as the chat API has them, and as text of the conversation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.agents.errors import ApiError
from trainer.environments.base import Message
from trainer.environments.tools import CALL
from trainer.files.documents import nests_deeply

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_FIELDS = {
    "system": {"role", "content"},
    "user": {"role", "content"},
    "assistant": {"role", "content", "tool_calls", "annotations"},
    "tool": {"role", "content", "tool_call_id", "name"},
}


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool."""

    name: str
    arguments: str
    """A JSON object."""

    def __str__(self) -> str:
        call = json.dumps({"name": self.name, "arguments": json.loads(self.arguments)}, ensure_ascii=False)
        return f"<tool_call>\n{call}\n</tool_call>"


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
        """The message as a renderer gets it, which writes calls in the format of its model."""
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
    parsed = _arguments(arguments or "{}")
    if parsed is None:
        field = f"{where}.function.arguments"
        raise ApiError(f"{field} must be a JSON object", field)
    return ToolCall(name, parsed)


def _arguments(text: str) -> str | None:
    """Return a JSON object as text that is the same for the same object; None: it is no object."""
    try:
        value = json.loads(text, parse_constant=_refuse)
        if not isinstance(value, dict) or nests_deeply(value):
            return None
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
        written.encode()
    except (ValueError, RecursionError):
        return None
    return written


def _refuse(text: str) -> float:
    raise ValueError(text)


def read_reply(text: str, reads_calls: bool) -> ChatMessage:
    """Return what the policy has said as a message.

    Calls of tools have the format of `ToolEnvironment`. If one of them cannot be read, all of the text is content.
    """
    if not reads_calls:
        return ChatMessage("assistant", text)
    calls = []
    for found in CALL.findall(text):
        call = _written_call(found)
        if call is None:
            return ChatMessage("assistant", text)
        calls.append(call)
    return ChatMessage("assistant", CALL.sub("", text).strip() if calls else text, tuple(calls))


def read_calls(message: Message) -> tuple[ToolCall, ...] | None:
    """Return the calls in a reply that a renderer has read; None: an agent could not send one of them back."""
    calls = [_checked_call(call["function"]) for call in message.get("tool_calls") or []]
    found = tuple(call for call in calls if call is not None)
    return found if len(found) == len(calls) else None


def _written_call(text: str) -> ToolCall | None:
    try:
        return _checked_call(json.loads(text, parse_constant=_refuse))
    except (ValueError, RecursionError):
        return None


def _checked_call(value: Any) -> ToolCall | None:
    """Return a call with a name that is text and arguments that are a JSON object; None: it is no such call."""
    try:
        name, arguments = value["name"], value.get("arguments", {})
        name.encode()
        written = _arguments(json.dumps(arguments, ensure_ascii=False))
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return None
    return ToolCall(name, written) if isinstance(name, str) and written is not None else None


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
