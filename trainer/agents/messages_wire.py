"""Anthropic's API: `POST /messages`, as Claude Code and Anthropic's clients speak it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from trainer.agents.call_tree import Answer
from trainer.agents.messages import ApiError, ChatMessage, event, in_order, read_call, read_text, read_tools
from trainer.agents.requests import ChatRequest, Rules, note_thinking, take_limit, take_stops

_TEXT = ("text",)


class MessagesWire:
    """Anthropic's API. The fields of blocks that are not named here do not count, as `cache_control`, which moves."""

    without_effect = frozenset({"metadata", "cache_control", "service_tier", "thinking"})
    neutral: Mapping[str, tuple[Any, ...]] = {}

    def read(self, given: dict[str, Any], rules: Rules, digest: str) -> ChatRequest:
        if "thinking" in given:
            note_thinking("thinking")
        system = read_text(given.pop("system", ""), "system", _TEXT, between="\n")
        messages = [ChatMessage("system", system)] if system else []
        messages += _messages(given.pop("messages", None))
        if not messages or messages[-1].role not in ("user", "tool"):
            raise ApiError("messages: the last one must be of the role user, and hold a text or an answer", "messages")
        tools = read_tools(given.pop("tools", []), _function)
        choice = given.get("tool_choice")
        if isinstance(choice, Mapping) and choice.get("disable_parallel_tool_use") and not rules.overrides:
            field = "tool_choice.disable_parallel_tool_use"
            raise ApiError(f"{field} must be false, or left out", field, "unsupported_value")
        context = given.pop("context_management", {})
        edits = context.get("edits", []) if isinstance(context, Mapping) else None
        if not isinstance(edits, list) or any(not isinstance(e, Mapping) or e.get("keep") != "all" for e in edits):
            field = "context_management"
            raise ApiError(f"{field}: the agent keeps its own history; leave it out", field, "unsupported_value")
        config = given.pop("output_config", {})
        if not isinstance(config, Mapping) or not set(config) <= {"effort", "format", "task_budget"}:
            raise ApiError("output_config may hold effort and format", "output_config")
        is_side = config.get("format") is not None  # JSON without tools: a client asks so for the title of a session
        if is_side and tools:
            field = "output_config.format"
            raise ApiError(f"{field}: the policy writes what it writes; leave it out", field, "unsupported_value")
        return ChatRequest(
            messages=in_order(messages),
            tools=tools,
            max_tokens=take_limit(given, "max_tokens"),
            stop=take_stops(given, "stop_sequences"),
            is_side=is_side,
        )

    def whole(self, answer: Answer) -> dict[str, Any]:
        return {
            **_head(answer),
            "content": _blocks(answer),
            "stop_reason": _stop_reason(answer),
            "stop_sequence": answer.turn.stop,
            "usage": _usage(answer, answer.completion_tokens),
        }

    def start(self, answer: Answer) -> bytes:
        start = {**_head(answer), "content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(answer, 0)}
        return event("message_start", message=start)

    def wait(self, answer: Answer, number: int) -> bytes:
        """Return an empty part of a text, which Claude Code takes for a sign of life: `ping` does not count."""
        block = {"type": "text", "text": ""}
        begun = event("content_block_start", index=0, content_block=block) if number == 0 else b""
        return begun + event("content_block_delta", index=0, delta={**block, "type": "text_delta"})

    def events(self, answer: Answer, waits: int) -> Iterator[bytes]:
        blocks = _blocks(answer)
        if waits and blocks[0]["type"] != "text":
            blocks.insert(0, {"type": "text", "text": ""})  # the block that has begun
        for index, block in enumerate(blocks):
            empty, deltas = _pieces(block)  # some clients read a block's beginning, others its deltas alone
            if index or not waits:
                yield event("content_block_start", index=index, content_block=empty)
            for delta in deltas:
                yield event("content_block_delta", index=index, delta=delta)
            yield event("content_block_stop", index=index)
        end = {"stop_reason": _stop_reason(answer), "stop_sequence": answer.turn.stop}
        yield event("message_delta", delta=end, usage=_usage(answer, answer.completion_tokens))
        yield event("message_stop")


def _head(answer: Answer) -> dict[str, Any]:
    return {"id": f"msg_{answer.name}", "type": "message", "role": "assistant", "model": answer.model}


def _usage(answer: Answer, output: int) -> dict[str, int]:
    """Clients shorten their history by these numbers."""
    cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"input_tokens": answer.prompt_tokens, **cached, "output_tokens": output}


def _stop_reason(answer: Answer) -> str:
    if answer.message.calls:
        return "tool_use"
    if answer.turn.stop is not None:
        return "stop_sequence"
    return "max_tokens" if answer.is_cut else "end_turn"


def _blocks(answer: Answer) -> list[dict[str, Any]]:
    thoughts, text = answer.thoughts_and_text
    blocks: list[dict[str, Any]] = []
    if thoughts:
        blocks.append({"type": "thinking", "thinking": thoughts, "signature": answer.name})
    if text or not answer.message.calls:
        blocks.append({"type": "text", "text": text})
    for name, call in answer.calls():
        blocks.append({"type": "tool_use", "id": name, "name": call.name, "input": json.loads(call.arguments)})
    return blocks


def _pieces(block: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a block as it begins, and the deltas that fill it."""
    if block["type"] == "thinking":
        deltas = [
            {"type": "thinking_delta", "thinking": block["thinking"]},
            {"type": "signature_delta", "signature": block["signature"]},
        ]
        return {**block, "thinking": "", "signature": ""}, deltas
    if block["type"] == "tool_use":
        return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]
    return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]


def _messages(value: Any) -> list[ChatMessage]:
    if not isinstance(value, list) or not value:
        raise ApiError("messages must be a list that is not empty", "messages")
    return [one for i, message in enumerate(value) for one in _message(message, f"messages[{i}]")]


def _message(value: Any, where: str) -> Iterator[ChatMessage]:
    """Yield what a message holds: answers of tools are messages of their own."""
    role = value.get("role") if isinstance(value, Mapping) else None
    if role not in ("user", "assistant", "system"):
        raise ApiError(f"{where}.role must be user, assistant or system", f"{where}.role")
    content = value.get("content")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise ApiError(f"{where}.content must be text, or a list of blocks", f"{where}.content")
    role = "assistant" if role == "assistant" else "user"  # templates have one system message, the first
    for i, block in enumerate(content):
        at = f"{where}.content[{i}]"
        match block.get("type") if isinstance(block, Mapping) else None, role:
            case "text", _:
                yield ChatMessage(role, read_text([block], at, _TEXT))
            case "tool_use", "assistant":
                arguments = json.dumps(block.get("input", {}), ensure_ascii=False)
                yield ChatMessage(role, "", (read_call(block.get("name"), arguments, block.get("id"), at),))
            case "thinking" | "redacted_thinking", "assistant":
                pass  # what the policy has thought is known
            case "tool_result", "user":
                text = read_text(block.get("content") or "", f"{at}.content", _TEXT, between="\n")
                call_id = block.get("tool_use_id")
                yield ChatMessage("tool", text, call_id=call_id if isinstance(call_id, str) else "")
            case _:
                kinds = "text, tool_use or thinking" if role == "assistant" else "text or tool_result"
                raise ApiError(f"{at} must be a block of the type {kinds}", at)


def _function(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type", "custom") not in ("custom", None):
        raise ApiError(f"{where} must be a tool of the agent's own (type custom), with a name", where)
    described = {"description": tool["description"]} if "description" in tool else {}
    return {"name": tool.get("name"), "parameters": tool.get("input_schema", {}), **described}
