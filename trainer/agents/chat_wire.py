"""The chat API: `POST /chat/completions`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from trainer.agents.call_tree import Answer
from trainer.agents.messages import ApiError, ChatMessage, read_call, read_text, read_tools
from trainer.agents.requests import OF_OPENAI, ChatRequest, Rules, note_thinking, take_flag, take_limit, take_stops
from trainer.environments.tools import ToolCall

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_REASONING = {"reasoning_content", "reasoning", "reasoning_details"}
"""Fields in which clients send thoughts back. What the policy has thought is known."""
_FIELDS = {
    "system": {"role", "content"},
    "user": {"role", "content"},
    "assistant": {"role", "content", "tool_calls", "annotations", *_REASONING},
    "tool": {"role", "content", "tool_call_id", "name"},
}


class ChatWire:
    """OpenAI's chat API, as vLLM and most packages speak it."""

    without_effect = OF_OPENAI | {"reasoning_effort", "seed"}
    neutral: Mapping[str, tuple[Any, ...]] = {
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
    }

    def read(self, given: dict[str, Any], rules: Rules, digest: str) -> ChatRequest:
        if "reasoning_effort" in given:
            note_thinking("reasoning_effort")
        options = given.pop("stream_options", {})
        if not isinstance(options, Mapping) or not set(options) <= {"include_usage"}:
            raise ApiError("stream_options may hold include_usage alone", "stream_options")
        return ChatRequest(
            messages=parse_messages(given.pop("messages", None)),
            tools=read_tools(given.pop("tools", []), _function),
            max_tokens=take_limit(given, "max_tokens", "max_completion_tokens"),
            stop=take_stops(given, "stop"),
            include_usage=take_flag(dict(options), "include_usage"),
        )

    def whole(self, answer: Answer) -> dict[str, Any]:
        calls = {"tool_calls": _calls_of(answer)} if answer.message.calls else {}
        message = {"role": "assistant", "content": _content_of(answer), **calls}
        choice = {"index": 0, "message": message, "finish_reason": _finish_reason(answer), "logprobs": None}
        return {**_head(answer, "chat.completion"), "choices": [choice], "usage": _usage(answer)}

    def start(self, answer: Answer) -> bytes:
        return _chunk(answer, {"role": "assistant"})  # once: clients join several

    def wait(self, answer: Answer, number: int) -> bytes:
        return _chunk(answer, {})

    def events(self, answer: Answer, waits: int) -> Iterator[bytes]:
        yield _chunk(answer, {"content": _content_of(answer)})
        for number, call in enumerate(_calls_of(answer)):
            yield _chunk(answer, {"tool_calls": [{"index": number, **call}]})
        yield _chunk(answer, {}, _finish_reason(answer))
        if answer.request.include_usage:
            yield _chunk(answer, None, usage=_usage(answer))
        yield b"data: [DONE]\n\n"


def _chunk(answer: Answer, delta: dict[str, Any] | None, finish_reason: str | None = None, **more: Any) -> bytes:
    head = _head(answer, "chat.completion.chunk") | ({"usage": None} if answer.request.include_usage else {})
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": None}
    return f"data: {json.dumps({**head, 'choices': [] if delta is None else [choice], **more})}\n\n".encode()


def _content_of(answer: Answer) -> str | None:
    return answer.message.content or (None if answer.message.calls else "")


def _finish_reason(answer: Answer) -> str:
    return "tool_calls" if answer.message.calls else answer.turn.completed.finish_reason


def _calls_of(answer: Answer) -> list[dict[str, Any]]:
    return [
        {"id": name, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for name, call in answer.calls()
    ]


def _head(answer: Answer, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{answer.name}", "object": kind, "created": 0, "model": answer.model}


def _usage(answer: Answer) -> dict[str, int]:
    prompt, completion = answer.prompt_tokens, answer.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


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
    calls, at = value.get("tool_calls") or [], f"{where}.tool_calls"
    if not isinstance(calls, list):
        raise ApiError(f"{at} must be a list", at)
    calls = tuple(_call(call, f"{at}[{i}]") for i, call in enumerate(calls))
    content = value.get("content")
    if content is None and role == "assistant":
        content = ""
    call_id = value.get("tool_call_id") or ""
    if not isinstance(call_id, str):
        raise ApiError(f"{where}.tool_call_id must be text", f"{where}.tool_call_id")
    return ChatMessage(role, read_text(content, f"{where}.content", ("text",)), calls, call_id)


def _call(value: Any, where: str) -> ToolCall:
    function = value.get("function") if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or value.get("type", "function") != "function":
        raise ApiError(f"{where} must be a call of a function", where)
    return read_call(function.get("name"), function.get("arguments"), value.get("id"), f"{where}.function")


def _function(tool: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    function = tool.get("function")
    if not isinstance(function, Mapping) or tool.get("type") != "function":
        raise ApiError(f"{where} must be a function with a name", where)
    return function
