"""Chats of rows: their messages and tools, and whether a chat template writes what they say."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from trainer.episodes import REPLY_MARK
from trainer.errors import UserError
from trainer.process import time_limits
from trainer.process.watchdog import deadline

LOG = logging.getLogger(__name__)

Message = dict[str, Any]

_WRITTEN = ("content", "reasoning_content", "reasoning", "thinking", "thought", "tool_calls", "function_call")
"""Fields of a reply that the policy would have to write."""


def read_chat(value: Any) -> list[Message] | None:
    """Return the messages of a row as chat templates get them; None: it is no chat.

    Each has a role and a text. The text may lack beside calls of tools. Fields that are null are left out.
    """
    if not isinstance(value, list) or not value:
        return None
    messages = []
    for one in value:
        if not isinstance(one, Mapping) or not isinstance(one.get("role"), str):
            return None
        message = {name: field for name, field in one.items() if field is not None}
        if message.get("tool_calls") and "content" not in message:
            message["content"] = ""
        if not isinstance(message.get("content"), str):
            return None
        messages.append(message)
    return messages


def beside(example: Mapping[str, Any], where: Callable[[], str]) -> tuple[list[Any] | None, dict[str, Any]]:
    """Return what the row of an example has beside its chat: JSON schemas of tools in the column `tools`, and variables
    of the chat template in `chat_template_kwargs`. Both may be JSON text.

    Raises:
        UserError: a column has something else.
    """
    row = example.get("row", {})
    tools, variables = _json_column(row, "tools"), _json_column(row, "chat_template_kwargs")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise UserError(
            f"{where()}: the column tools must have a list of tools as JSON schemas; rename the column if it has "
            "something else"
        )
    if variables is not None and not isinstance(variables, dict):
        problem = "the column chat_template_kwargs must have an object with variables of the template"
        raise UserError(f"{where()}: {problem}")
    return tools or None, variables or {}


def _json_column(row: Mapping[str, Any], name: str) -> Any:
    value = row.get(name)
    try:
        return json.loads(value) if isinstance(value, str) and value else value or None
    except ValueError:
        return value


def with_other_arguments(messages: Sequence[Message]) -> list[Message] | None:
    """Return messages whose calls have their arguments as objects instead of JSON text, or the reverse.

    None: there is no call.
    """
    if not any(message.get("tool_calls") for message in messages):
        return None
    return [
        {**message, "tool_calls": list(map(_with_other_arguments, message["tool_calls"]))}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _with_other_arguments(call: Any) -> Any:
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _with_other_arguments(call["function"])}
    arguments = call.get("arguments")
    if isinstance(arguments, Mapping):
        return {**call, "arguments": json.dumps(arguments, ensure_ascii=False)}
    try:
        return {**call, "arguments": json.loads(arguments)} if isinstance(arguments, str) else call
    except ValueError:
        return call


def writes_strings(text: str, messages: Sequence[Message]) -> bool:
    """Return whether a rendered text has arguments of a call as a JSON string, in quotes."""
    calls = [call for message in messages for call in message.get("tool_calls") or [] if isinstance(call, Mapping)]
    given = [call.get("function", call).get("arguments") for call in calls]
    return any(isinstance(one, str) and (json.dumps(one, ensure_ascii=False) in text) for one in given)


def template_in_use(tokenizer: Any) -> str:
    """Return which chat template is in use, for errors."""
    return f"the chat template in use (that of {tokenizer.name_or_path}, if the key is not set)"


def says(text: str, part: str) -> bool:
    """Return whether a rendered text says what a part of a message says.

    Blanks, upper case, punctuation and the escapes of JSON do not count: templates change them.
    """
    part = part.strip()
    if part in text or any(json.dumps(part, ensure_ascii=ascii)[1:-1] in text for ascii in (True, False)):
        return True
    letters = _letters(part)
    return bool(letters) and letters in _letters(text)


def _letters(text: str) -> str:
    return "".join(filter(str.isalnum, text.casefold()))


def unsaid_field(text: str, message: Message) -> str:
    """Return the first field of a reply of which a rendered text says nothing; empty: there is none."""
    for field in _WRITTEN:
        value = message.get(field)
        parts = [value] if isinstance(value, str) else _leaves(value)
        if field == "content" and isinstance(value, str) and "</think>" in value:  # templates write other blanks there
            before, _, after = value.partition("</think>")
            parts = [before.rpartition("<think>")[2], after]
        if not all(says(text, part) for part in parts):
            return field
    return ""


def _leaves(calls: Any) -> list[str]:
    """Return the names and the arguments of calls, as texts."""
    if isinstance(calls, Mapping):
        known = {name: value for name, value in calls.items() if name not in ("id", "type", "index")}
        arguments = known.get("arguments")
        if isinstance(arguments, str):
            with contextlib.suppress(ValueError):
                known["arguments"] = json.loads(arguments)
        return [leaf for value in known.values() for leaf in _leaves(value)]
    if isinstance(calls, list):
        return [leaf for value in calls for leaf in _leaves(value)]
    is_plain = calls is None or isinstance(calls, bool)  # formats write them in other words
    return [] if is_plain else [calls if isinstance(calls, str) else json.dumps(calls, default=str)]


def check_generation_prompt(tokenizer: Any) -> None:
    """Refuse a chat template that writes something before a reply, and never at the end of a prompt.

    Some templates write nothing before a reply. There is nothing to write for a template that writes no reply at all.

    Raises:
        UserError: the policy would have to write it.
    """
    chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": REPLY_MARK}]
    try:
        with deadline(time_limits.RENDER_S):
            prompts = {tokenizer.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=p) for p in (0, 1)}
            text = tokenizer.apply_chat_template(chat, tokenize=False)
    except Exception:  # it writes no such chat
        return
    prompt = prompts.pop()
    before, is_written, _ = text.removeprefix(prompt).partition(REPLY_MARK)
    if not prompts and text.startswith(prompt) and is_written and before.strip():
        raise UserError(
            f"model.chat_template: {template_in_use(tokenizer)} writes no generation prompt, and {before!r} before a "
            "reply, so the policy would have to write that; choose a template that reads add_generation_prompt"
        )


Unseen = tuple[str, str, int, int]
"""What prompts lack, the first row of them, and their number, of so many."""


class PromptCheck:
    """Finds what a chat template does not write of the prompts of a data set.

    Args:
        system_prompt: `data.system_prompt`, with the name of its key.

    Raises:
        UserError: the template lacks a generation prompt.
    """

    def __init__(self, tokenizer: Any, system_prompt: tuple[str, str | None] = ("data.system_prompt", None)):
        check_generation_prompt(tokenizer)
        self._tokenizer = tokenizer
        self._template = template_in_use(tokenizer)
        self._system_key, self._system_prompt = system_prompt
        others = (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id)
        self._unknown = None if tokenizer.unk_token_id in others else tokenizer.unk_token_id
        self._rows = 0
        self._unseen: dict[str, list[Any]] = {}  # by what: the first row, and the number of rows

    def add(self, messages: Sequence[Message], text: str, token_ids: Sequence[int], where: Callable[[], str]) -> None:
        """Check one prompt.

        Raises:
            UserError: it writes nothing of what the user says, or of `data.system_prompt`.
        """
        self._rows += 1
        if self._unknown in token_ids and self._tokenizer.unk_token not in text:
            self._note("a character that the tokenizer does not know", where)
        unseen = [m for m in messages if not says(text, m["content"].rpartition("</think>")[2])]
        if not unseen:
            return
        asked = [m for m in messages if m["role"] == "user"] or messages
        if all(m in unseen for m in asked):
            raise UserError(
                f"model.chat_template: {self._template} writes nothing of what the user says in {where()}, so the "
                "policy would not see it; choose another template"
            )
        if unseen[0]["role"] == "system" and unseen[0]["content"] == self._system_prompt:
            raise UserError(
                f"{self._system_key}: {self._template} does not write it, so the policy would not see it; choose "
                "another template (model.chat_template), or put it into the prompts"
            )
        for role in {m["role"] for m in unseen}:
            self._note(f"a message of the role {role}", where)

    def unseen(self) -> list[Unseen]:
        """Return what the policy does not see."""
        return [(what, first, count, self._rows) for what, (first, count) in self._unseen.items()]

    def close(self) -> None:
        """Log what the policy does not see."""
        log_unseen(self.unseen())

    def _note(self, what: str, where: Callable[[], str]) -> None:
        if what not in self._unseen:
            self._unseen[what] = [where(), 0]
        self._unseen[what][1] += 1


def log_unseen(unseen: Iterable[Unseen]) -> None:
    """Log what the policy does not see of the prompts."""
    for what, first, count, rows in unseen:
        LOG.warning(
            "model.chat_template: the policy does not see all of %d of %d prompts: %s is left out; the first is %s",
            count,
            rows,
            what,
            first,
        )
