"""OpenAI's API of responses: `POST /responses`, as Codex and newer OpenAI clients speak it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trainer.agents.call_tree import Answer
from trainer.agents.messages import ApiError, ChatMessage, event, in_order, read_call, read_text, read_tools
from trainer.agents.requests import OF_OPENAI, ChatRequest, Rules, note_once, note_thinking, take_limit

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_TEXTS = ("input_text", "output_text", "text")
_ENCRYPTED = "reasoning.encrypted_content"


class ResponsesWire:
    """OpenAI's API of responses, for one episode: it knows the items that it has given out.

    Clients may send an item, or all that came before, by its id alone.
    """

    without_effect = OF_OPENAI | {"client_metadata", "reasoning", "stream_options", "truncation"}
    neutral: Mapping[str, tuple[Any, ...]] = {
        "background": (False,),
        "parallel_tool_calls": (True,),
        "top_logprobs": (0,),
    }

    def __init__(self) -> None:
        self._items: dict[str, dict[str, Any]] = {}  # by id
        self._asked: dict[str, list[ChatMessage]] = {}  # by the digest of the request
        self._histories: dict[str, list[ChatMessage]] = {}  # by the id of the response
        self._known: dict[Any, ChatMessage] = {}  # so that the histories share their messages

    def read(self, given: dict[str, Any], rules: Rules, digest: str) -> ChatRequest:
        if "reasoning" in given:
            note_thinking("reasoning")
        if (include := given.pop("include", [])) not in ([], [_ENCRYPTED]):
            raise ApiError(f"include may hold {_ENCRYPTED} alone, not {include!r:.100}", "include")
        config = given.pop("text", {})
        kind = config.get("format", {"type": "text"}) if isinstance(config, Mapping) else None
        if not isinstance(kind, Mapping) or kind.get("type") != "text":
            problem = "text.format must be text, or left out: the policy writes what it writes"
            raise ApiError(problem, "text.format", "unsupported_value")
        asked = [*self._history(given.pop("previous_response_id", None)), *self._messages(given.pop("input", None))]
        if not asked:
            raise ApiError("input must not be empty", "input")
        self._asked[digest] = [self._known.setdefault((one, *(call.id for call in one.calls)), one) for one in asked]
        instructions = read_text(given.pop("instructions", ""), "instructions", _TEXTS)
        system = [ChatMessage("system", instructions)] if instructions else []
        return ChatRequest(
            messages=in_order([*system, *asked]),
            tools=read_tools(given.pop("tools", []), _function),
            max_tokens=take_limit(given, "max_output_tokens"),
        )

    def whole(self, answer: Answer) -> dict[str, Any]:
        items = self._output(answer)
        prompt, completion = answer.prompt_tokens, answer.completion_tokens
        counts = {"input_tokens": prompt, "output_tokens": completion, "total_tokens": prompt + completion}
        details = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
        return {
            **_head(answer),
            "status": "incomplete" if answer.is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if answer.is_cut else None,
            "output": items,
            "usage": {**counts, **details},
        }

    def start(self, answer: Answer) -> bytes:
        return event("response.created", sequence_number=0, response=_begun(answer)) + self.wait(answer, -1)

    def wait(self, answer: Answer, number: int) -> bytes:
        return event("response.in_progress", sequence_number=number + 2, response=_begun(answer))

    def events(self, answer: Answer, waits: int) -> Iterator[bytes]:
        numbers, whole = itertools.count(waits + 2), self.whole(answer)
        for index, item in enumerate(whole["output"]):
            for kind, fields in _steps(item):
                yield event(kind, sequence_number=next(numbers), output_index=index, **fields)
        yield event(f"response.{whole['status']}", sequence_number=next(numbers), response=whole)

    def _output(self, answer: Answer) -> list[dict[str, Any]]:
        """Return the items of an answer, and remember them, and the history that ends with it."""
        thoughts, text = answer.thoughts_and_text
        items: list[dict[str, Any]] = []
        if thoughts:
            content = [{"type": "reasoning_text", "text": thoughts}]
            item = {"id": f"rs_{answer.name}", "type": "reasoning", "summary": [], "content": content}
            items.append({**item, "encrypted_content": answer.name})
        if text or not answer.message.calls:
            content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
            item = {"id": f"msg_{answer.name}", "type": "message", "role": "assistant", "status": "completed"}
            items.append({**item, "content": content})
        for number, (call_id, call) in enumerate(answer.calls()):
            item = {"id": f"fc_{answer.name}_{number}", "type": "function_call", "status": "completed"}
            items.append({**item, "call_id": call_id, "name": call.name, "arguments": call.arguments})
        self._items |= {item["id"]: item for item in items}
        if (asked := self._asked.get(answer.request.digest)) is not None:
            self._histories[f"resp_{answer.name}"] = [*asked, *self._messages(items)]
        return items

    def _history(self, response: Any) -> Sequence[ChatMessage]:
        if response is None:
            return ()
        if not isinstance(response, str) or response not in self._histories:
            field = "previous_response_id"
            raise ApiError(f"{field}: this episode has no response {response!r:.100}", field)
        return self._histories[response]

    def _messages(self, value: Any) -> list[ChatMessage]:
        if isinstance(value, str):
            value = [{"role": "user", "content": value}]
        if not isinstance(value, list):
            raise ApiError("input must be text, or a list of items", "input")
        return [one for i, item in enumerate(value) for one in self._item(item, f"input[{i}]")]

    def _item(self, item: Any, where: str) -> Iterator[ChatMessage]:
        if not isinstance(item, Mapping):
            raise ApiError(f"{where} must be an object", where)
        match item.get("type") or ("message" if "role" in item else "item_reference"):
            case "message":
                role = _ROLES.get(str(item.get("role")))
                if role is None:
                    raise ApiError(f"{where}.role must be one of {', '.join(_ROLES)}", f"{where}.role")
                yield ChatMessage(role, read_text(item.get("content"), f"{where}.content", _TEXTS))
            case "function_call":
                call = read_call(item.get("name"), item.get("arguments"), item.get("call_id"), where)
                yield ChatMessage("assistant", "", (call,))
            case "function_call_output":
                call_id = item.get("call_id")
                output = read_text(item.get("output"), f"{where}.output", _TEXTS)
                yield ChatMessage("tool", output, call_id=call_id if isinstance(call_id, str) else "")
            case "reasoning":
                pass  # what the policy has thought is known
            case "item_reference":
                known = self._items.get(str(item.get("id")))
                if known is None:
                    raise ApiError(f"{where}.id: this episode has no item {item.get('id')!r:.100}", f"{where}.id")
                yield from self._item(known, where)
            case kind:
                raise ApiError(f"{where}.type: this endpoint does not read items of the type {kind!r:.100}", where)


def _head(answer: Answer) -> dict[str, Any]:
    head = {"id": f"resp_{answer.name}", "object": "response", "created_at": 0, "model": answer.model}
    usual = {"metadata": {}, "parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
    return {**head, **usual, **dict.fromkeys(("error", "instructions", "temperature", "top_p"))}


def _begun(answer: Answer) -> dict[str, Any]:
    return {**_head(answer), "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}


def _steps(item: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the events that build an item: clients differ in which of them they read."""
    one = {"item_id": item["id"]}
    match item["type"]:
        case "message":
            yield "response.output_item.added", {"item": {**item, "status": "in_progress", "content": []}}
            (part,) = item["content"]
            at = {**one, "content_index": 0}
            yield "response.content_part.added", {**at, "part": {**part, "text": ""}}
            yield "response.output_text.delta", {**at, "delta": part["text"], "logprobs": []}
            yield "response.output_text.done", {**at, "text": part["text"], "logprobs": []}
            yield "response.content_part.done", {**at, "part": part}
        case "function_call":
            yield "response.output_item.added", {"item": {**item, "status": "in_progress", "arguments": ""}}
            yield "response.function_call_arguments.delta", {**one, "delta": item["arguments"]}
            name = {"name": item["name"], "arguments": item["arguments"]}
            yield "response.function_call_arguments.done", {**one, **name}
        case _:
            yield "response.output_item.added", {"item": item}
    yield "response.output_item.done", {"item": item}


def _function(tool: Mapping[str, Any], where: str) -> dict[str, Any] | None:
    """Return a function; None: the tool is one of a server."""
    if tool.get("type") == "function":
        return {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
    note_once(f"tools of the type {tool.get('type')!r:.40} are left out: the policy sees functions alone")
    return None
