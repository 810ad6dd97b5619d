"""Tools in the format of the model's own chat template, which describes them and writes calls and answers.

Replies are read as the tokenizer's `response_template` says (the opposite of a chat template, see `parse_response` of
transformers). Without one they are read in the format of Hermes, if the template writes calls so.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.config import ModelConfig
from trainer.data.datasets import render_text
from trainer.data.tokens import reply_text
from trainer.environments.base import Message
from trainer.environments.tools import read_calls, split_calls, unread_reply
from trainer.episodes import REPLY_MARK
from trainer.errors import UserError

LOG = logging.getLogger(__name__)

_NAME, _ANSWER = "look_7f3a91c4", "Answer-7f3a91c4"
PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "Look.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "description": "One."}, "b": {"type": "string"}},
            "required": ["a", "b"],
        },
    },
}
"""A tool to try templates with."""
_USER = {"role": "user", "content": "2+2?"}
_SYSTEM = {"role": "system", "content": "Be brief."}


class TemplateTools:
    """Reads the replies of conversations whose tools the model's own chat template describes.

    Args:
        has_response_template: the tokenizer's `response_template` reads replies. Else they have the format of Hermes.
    """

    def __init__(self, tokenizer: Any, has_response_template: bool):
        self._tokenizer = tokenizer
        self.has_response_template = has_response_template

    def reply(self, token_ids: Sequence[int], prompt: Sequence[int], text: str, tools: Sequence[Any]) -> Message:
        """Return a reply as a message, with its calls of tools apart from its text.

        If a call cannot be read, the reply is its text as a whole (see `unread_reply`).

        Args:
            prompt: the tokens before the reply.
            text: the decoded reply (see `reply_text`).
        """
        if not self.has_response_template:
            content, written = split_calls(text)
            message: Message = {"role": "assistant", "content": content}
            named = [{"name": call.name, "arguments": json.loads(call.arguments)} for call in written]
            return {**message, "tool_calls": [_named_call(*one) for one in enumerate(named)]} if named else message
        try:
            said, before = self._tokenizer.decode(list(token_ids)), self._tokenizer.decode(list(prompt))
            parsed = dict(self._tokenizer.parse_response(said, prefix=before, tools=list(tools)))
            found = parsed.pop("tool_calls", None) or []
            calls = [_named_call(*one) for one in enumerate([found] if isinstance(found, dict) else found)]
        except Exception as error:  # what the policy has written may be anything
            problem = "invalid json" if isinstance(error, ValueError) else type(error).__name__
            return unread_reply(text, [{"problem": problem}])
        message = {"content": "", **{name: value for name, value in parsed.items() if isinstance(value, str)}}
        message["role"] = "assistant"
        if not calls:
            return message
        message["tool_calls"] = calls
        return message if read_calls(message) is not None else unread_reply(text, list(map(_problem, calls)))


def _named_call(number: int, call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call as the chat API has it. Formats without JSON may write no arguments where there are none."""
    function = call.get("function", call)
    given = call.get("id")
    return {
        "id": given if given and isinstance(given, str) else f"call_{number}",
        "type": "function",
        "function": {"name": function["name"], "arguments": function.get("arguments") or {}},
    }


def _problem(call: Mapping[str, Any]) -> dict[str, str]:
    """Return the name of a call and its number, if they are known, and why it cannot be read; empty: it can be."""
    name = call["function"]["name"]
    known = {"name": name} if name and isinstance(name, str) else {}
    is_readable = read_calls({"tool_calls": [call]}) is not None
    return {**known, "id": call["id"], "problem": "" if is_readable else "no readable arguments"}


def outline(said: Message, new: Sequence[Message], tools: Sequence[Any] | None) -> Message:
    """Return a reply with `REPLY_MARK` in place of its text, or of the arguments of its last call.

    The ids and names of calls stay, because templates may write them into the answers. A reply whose calls could not be
    read gets a call for each answer: some templates write answers to calls alone.

    Args:
        new: the messages that follow the reply.
        tools: that the template describes; None: calls are a part of the text of replies.
    """
    plain: Message = {"role": "assistant", "content": REPLY_MARK}
    if not tools:
        return plain
    calls = said.get("tool_calls") or _answered_calls(new)
    if not calls:
        return plain
    *others, last = [{**call, "function": {**call["function"], "arguments": {}}} for call in calls]
    last["function"]["arguments"] = {"x": REPLY_MARK}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", **call} for call in (*others, last)],
    }


def _answered_calls(new: Sequence[Message]) -> list[dict[str, Any]]:
    """Return a call for each answer of a tool."""
    return [
        {
            "id": message.get("tool_call_id", f"call_{number}"),
            "type": "function",
            "function": {"name": message.get("name", "tool"), "arguments": {}},
        }
        for number, message in enumerate(message for message in new if message["role"] == "tool")
    ]


def with_answered_calls(messages: Sequence[Message]) -> list[Message]:
    """Return messages in which each reply whose calls could not be read has a call for each answer."""
    found, answers = [], 0
    for index in reversed(range(len(messages))):
        message = messages[index]
        if message["role"] == "assistant" and answers and not message.get("tool_calls"):
            message = {**message, "tool_calls": _answered_calls(messages[index + 1 : index + 1 + answers])}
        answers = answers + 1 if message["role"] == "tool" else 0
        found.append(message)
    return found[::-1]


def find_reader(model: ModelConfig, tokenizer: Any) -> TemplateTools | None:
    """Return what reads calls of tools in the format of the chat template.

    None: the template does not describe tools, or its calls cannot be read. Then tools have the format of Hermes
    (`trainer.environments.tools`), as text of the system message.
    """
    return None if model.path is None else _find_reader(tokenizer, str(tokenizer.chat_template))


@functools.lru_cache(maxsize=16)
def _find_reader(tokenizer: Any, template: str) -> TemplateTools | None:
    if not _describes_tools(tokenizer):
        _log_fallback("describes no tools")
        return None
    for way in [True, False] if getattr(tokenizer, "response_template", None) is not None else [False]:
        found = TemplateTools(tokenizer, way)
        if _reads(found, tokenizer):
            return found
    _log_fallback(
        "writes calls of tools in a format that cannot be read (its tokenizer has no fitting response_template)"
    )
    return None


@functools.cache
def _log_fallback(problem: str) -> None:
    LOG.info(
        "tools, if there are any, are described and called in the format of Hermes: the model's own chat template %s",
        problem,
    )


def _describes_tools(tokenizer: Any) -> bool:
    """Return whether a template writes the tools that it is given, beside the other messages."""
    try:
        for messages in ([_USER], [_SYSTEM, _USER]):
            without = render_text(tokenizer, messages, add_generation_prompt=True)
            text = render_text(tokenizer, messages, add_generation_prompt=True, tools=[PROBE_TOOL])
            if _NAME in without or not all(part in text for part in (_NAME, *(one["content"] for one in messages))):
                return False
    except UserError:
        return False
    return True


def _reads(found: TemplateTools, tokenizer: Any) -> bool:
    """Return whether replies are read as the template writes them: without a call, with one, and with two if it can.

    The templates of Llama 3 and gpt-oss write one call of a reply.
    """
    text, two = "", {"role": "assistant", "content": "", "tool_calls": _calls(2)}
    with contextlib.suppress(UserError):
        text = render_text(tokenizer, [_USER, two], add_generation_prompt=False, tools=[PROBE_TOOL])
    counts = [0, 1, 2] if str(two["tool_calls"][1]["function"]["arguments"]["a"]) in text else [0, 1]
    try:
        return all(_reads_reply(found, tokenizer, _calls(count)) for count in counts)
    except UserError:
        return False


def _calls(count: int) -> list[dict[str, Any]]:
    functions = [{"name": _NAME, "arguments": {"a": 70413 + number, "b": "é 7"}} for number in range(count)]
    return [_named_call(*one) for one in enumerate(functions)]


def _reads_reply(found: TemplateTools, tokenizer: Any, calls: list[dict[str, Any]]) -> bool:
    """Return whether a reply with calls, or with `REPLY_MARK`, is read as it was, and the answers to it are written."""
    reply: Message = {"role": "assistant", "content": "" if calls else REPLY_MARK}
    if calls:
        reply["tool_calls"] = calls
    answers = [
        {"role": "tool", "tool_call_id": call["id"], "name": _NAME, "content": f"{_ANSWER}-{call['id']}"}
        for call in calls
    ]
    write = functools.partial(render_text, tokenizer, tools=[PROBE_TOOL])
    answered = write([_USER, reply, *answers], add_generation_prompt=True)
    if not all(answer["content"] in answered for answer in answers):
        return False
    begin = write([_USER], add_generation_prompt=True)
    encode = functools.partial(tokenizer.encode, add_special_tokens=False)
    prompt, whole = encode(begin), encode(write([_USER, reply], add_generation_prompt=False).rstrip())
    says = whole[len(os.path.commonprefix([whole, prompt])) :]
    if begin.rstrip().endswith("<think>") and "</think>" not in tokenizer.decode(says):
        says = encode("Hm.\n</think>\n\n") + says  # the template drops thoughts of replies
    message = found.reply(says, prompt, reply_text(tokenizer, says, has_ended=True), [PROBE_TOOL])
    if [call["function"] for call in message.get("tool_calls", [])] != [call["function"] for call in calls]:
        return False
    return bool(calls) or REPLY_MARK in message["content"]
