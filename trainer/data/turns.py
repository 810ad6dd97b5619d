"""The replies of a chat as the policy would have to write them: after the generation prompt, up to their end token."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from trainer.data.chats import Message, template_in_use, unsaid_field
from trainer.data.tokens import beginning, encode
from trainer.episodes import REPLY_MARK
from trainer.errors import UserError

Write = Callable[[Sequence[Message], bool], str]
"""Renders messages, with or without a generation prompt."""


class Stops:
    """The tokens that end a reply, and their texts."""

    def __init__(self, tokenizer: Any, token_ids: Collection[int]):
        added = tokenizer.added_tokens_decoder
        self.token_ids = frozenset(token_ids)
        self.by_text = {added[token].content: token for token in token_ids if token in added}
        self._texts = sorted(filter(None, self.by_text), key=len, reverse=True)
        self._at_start = re.compile(rf"\s*+({'|'.join(map(re.escape, self._texts)) or '(?!)'})")

    def end(self, text: str) -> int | None:
        """Return where a reply ends in what the template writes of it: behind the first of its last stop tokens."""
        end, rest = None, len(text)
        while rest:
            stop = next((stop for stop in self._texts if text.endswith(stop, 0, rest)), "")
            if not stop and not text[rest - 1].isspace():
                break
            end = rest if stop else end
            rest -= len(stop) or 1
        return end

    def beginning(self, text: str) -> str:
        """Return the stop token that a text begins with, blanks included; empty: it begins with another one."""
        found = self._at_start.match(text)
        return found[0] if found else ""

    def last(self, text: str) -> str:
        """Return the stop token that a text ends with; empty: it ends with another one."""
        return next((stop for stop in self.by_text if text.endswith(stop)), "")


class Row:
    """A row of training data, as it grows: tokens, and a mask of those that are learnt."""

    def __init__(self, tokenizer: Any, stops: Stops, max_length: int):
        self._tokenizer, self._stops, self._max_length = tokenizer, stops, max_length
        self._text = ""
        self.token_ids: list[int] = []
        self.mask: list[float] = []
        self.prompt = ""
        """The text before the last reply."""

    def goes_on(self, prompt: str) -> bool:
        """Return whether a prompt begins with this row, which ends with a stop token."""
        return bool(self._stops.last(self._text)) and prompt.startswith(self._text)

    def add(self, prompt: str, reply: str) -> None:
        """Add a reply, which is learnt, and what the prompt has before it."""
        stop = self._stops.last(self._text)
        new = stop + prompt[len(self._text) :]  # some tokens take the blanks behind them
        self._text, self.prompt = prompt + reply, prompt
        if len(self.token_ids) >= self._max_length:  # the rest is cut off
            return
        before = self._encode(new)
        whole = self._encode(new + reply)
        if whole[: len(before)] == before:
            said = whole[len(before) :]
        else:  # the tokenizer joins the end of the prompt and the beginning of the reply, which the policy cannot do
            said = self._encode(reply)
        if not self._stops.last(reply):
            said.append(self._tokenizer.eos_token_id)
        before = before[bool(stop) :]
        self.token_ids += before + said
        self.mask += [0.0] * len(before) + [1.0] * len(said)

    def _encode(self, text: str) -> list[int]:
        """Return at least the first tokens of a text, as many as may be learnt."""
        return encode(self._tokenizer, beginning(self._tokenizer, text, self._max_length), math.inf)


def replies_of(
    tokenizer: Any, stops: Stops, write: Write, messages: Sequence[Message], indices: Sequence[int]
) -> list[tuple[str, str]]:
    """Return the prompts that the policy sees before the replies with these indices, each with its reply.

    Raises:
        UserError: the chat template does not write one of them, or a part of it, after its prompt.
    """
    found, in_use = [], template_in_use(tokenizer)
    for index in indices:
        name = f"message {index + 1}"
        prompt = write(messages[:index], True) if index else ""
        whole = write(messages[: index + 1], False)
        reply: str | None = None
        if prompt and whole.startswith(prompt):
            reply = whole[len(prompt) :]
        elif prompt:
            reply = _after_header(write, messages, index, prompt, whole)
            reply = reply or _after_thought(messages[index], prompt, whole, stops)
        if reply is None:
            raise UserError(
                f"{name}: {in_use} does not write this reply after its generation prompt, "
                "so the policy could not learn it; change the row, or choose another template (model.chat_template)"
            )
        if unsaid := unsaid_field(reply, messages[index]):
            raise UserError(
                f"{name}.{unsaid}: {in_use} does not write all of it in a reply, so the "
                "policy could not learn it; leave it out, or choose another template (model.chat_template)"
            )
        found.append((prompt, _ended(write, messages, index, reply, stops)))
    return found


def _after_header(write: Write, messages: Sequence[Message], index: int, prompt: str, whole: str) -> str:
    """Return what follows the generation prompt where the template writes the history in another way before a reply.

    gpt-oss drops earlier thoughts when the last message is a final one.
    """
    try:
        header = prompt[len(os.path.commonprefix([prompt, write(messages[:index], False)])) :]
        reply_begins = _where_differs(write, messages[: index + 1], index, whole)
        history_ends = _where_differs(write, messages[: index + 1], index - 1, whole)
    except UserError:
        return ""
    at = whole.rfind(header, history_ends, reply_begins) if header else -1
    return whole[at + len(header) :] if at >= 0 else ""


def _where_differs(write: Write, messages: Sequence[Message], index: int, whole: str) -> int:
    """Return where a chat changes if all texts of a message do."""
    message = dict(messages[index])
    for name, value in message.items():
        if name not in ("role", "tool_call_id") and isinstance(value, str) and value:
            message[name] = REPLY_MARK + value
    if message.get("tool_calls"):
        message["tool_calls"] = [_with_other_name(call) for call in message["tool_calls"]]
    other = write([*messages[:index], message, *messages[index + 1 :]], False)
    return len(os.path.commonprefix([whole, other]))


def _with_other_name(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if isinstance(function, Mapping):
        return {**call, "function": _with_other_name(function)}
    return {**call, "name": f"{REPLY_MARK}{call.get('name', '')}"}


def _after_thought(message: Message, prompt: str, whole: str, stops: Stops) -> str | None:
    """Return a reply with a thought that the generation prompt opens, and the template drops (DeepSeek-R1)."""
    opened = re.search(r"(<[^<>\s]+>)(\s*)\Z", prompt)
    content = message["content"].lstrip()
    if opened is None or message.get("tool_calls") or not content.startswith(opened[1]) or "</think>" not in content:
        return None
    end = stops.end(whole)
    said = content[len(opened[1]) :].removeprefix(opened[2])
    return said + (stops.last(whole[:end]) if end is not None else "")


def _ended(write: Write, messages: Sequence[Message], index: int, reply: str, stops: Stops) -> str:
    """Return a reply up to its end token, if the template writes one: in the reply, or where the next message begins.

    GLM writes none in the reply: the next message begins with the token that ends it.
    """
    end = stops.end(reply)
    if end is not None:
        return reply[:end]
    message: Message = {"role": "tool" if messages[index].get("tool_calls") else "user"}
    if index + 1 < len(messages):
        message = dict(messages[index + 1])
    try:
        text = write([*messages[: index + 1], {**message, "content": REPLY_MARK}], False)
    except UserError:
        return reply
    before, _, _ = text.partition(REPLY_MARK)
    tail = reply.rstrip()[-40:]
    _, is_found, rest = before.rpartition(tail) if tail else ("", "", "")
    stop = stops.beginning(rest) if is_found else ""
    return reply.rstrip() + stop if stop else reply
