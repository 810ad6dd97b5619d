"""Calls of tools in replies: as text in the format of `ToolEnvironment`, and as the chat API has them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from trainer.environments.base import Message
from trainer.environments.tools import CALL
from trainer.files.documents import nests_deeply


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool."""

    name: str
    arguments: str
    """A JSON object."""
    id: str = field(default="", compare=False)
    """What its answer calls it; empty: it is not known."""

    def __str__(self) -> str:
        call = json.dumps({"name": self.name, "arguments": json.loads(self.arguments)}, ensure_ascii=False)
        return f"<tool_call>\n{call}\n</tool_call>"


def split_calls(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    """Return a reply without its calls, and the calls. If one of them cannot be read, all of the text is content."""
    calls = []
    for found in CALL.findall(text):
        call = _written_call(found)
        if call is None:
            return text, ()
        calls.append(call)
    return (CALL.sub("", text).strip(), tuple(calls)) if calls else (text, ())


def read_calls(message: Message) -> tuple[ToolCall, ...] | None:
    """Return the calls that a reply names; None: an agent could not send one of them back."""
    calls = [_checked_call(call["function"]) for call in message.get("tool_calls") or []]
    found = tuple(call for call in calls if call is not None)
    return found if len(found) == len(calls) else None


def normal_arguments(text: str) -> str | None:
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
        written = normal_arguments(json.dumps(arguments, ensure_ascii=False))
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return None
    return ToolCall(name, written) if isinstance(name, str) and written is not None else None
