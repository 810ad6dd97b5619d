"""The tokens of a conversation. What the policy has sampled is kept token by token, and never rendered again."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from trainer.data.chats import template_in_use
from trainer.data.datasets import render_text
from trainer.data.tokens import TextTooLong, encode, reply_text
from trainer.environments.base import Message
from trainer.environments.template_tools import PROBE_TOOL, TemplateTools, outline, with_answered_calls
from trainer.environments.tools import split_tools
from trainer.episodes import REPLY_MARK, Sample
from trainer.errors import UserError
from trainer.generation.engine import Completion

_ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles of chats that any template may write without naming them."""


class Conversation:
    """The messages of an episode, and their tokens.

    The first messages are rendered through the chat template. A reply adds the tokens that were sampled. Then the
    environment's messages add the tokens that the template writes between that reply and the next one. If it does not
    write them there (it changes earlier messages, or ends a reply in another way than the policy did), the history is
    rendered as a whole, and a new `Sample` begins.

    Args:
        limit: texts with more characters are too long, and not encoded (see `trainer.data.tokens`).
        reader: reads the calls of tools that the chat template describes; None: they are text.

    Raises:
        UserError: the chat template refuses the messages, or drops them.
        TextTooLong: the first messages are too long.
    """

    def __init__(
        self, tokenizer: Any, messages: Sequence[Message], limit: float = math.inf, reader: TemplateTools | None = None
    ):
        self._tokenizer = tokenizer
        self._limit = limit
        self._reader = reader
        self._tools: list[Any] | None = None  # those that the chat template describes
        self.messages: list[Message] = list(messages)
        self._outline: list[Message] = list(messages)
        """The messages as the template gets them, with `REPLY_MARK` in place of what the policy said."""
        if self._reader is not None:
            self._outline, self._tools = split_tools(messages)
        self._bare: list[tuple[int, str]] = []
        """Replies with special tokens: their index in `messages`, and their text without these."""
        self._earlier: list[Sample] = []
        self._check_roles(messages)
        self._begin(self._whole())

    def _check_roles(self, messages: Sequence[Message]) -> None:
        """Check that the template knows the roles of messages, and writes what these say.

        Raises:
            UserError: it drops them, or would write a role that neither it nor other models have.
        """
        template = self._tokenizer.chat_template
        in_use = template_in_use(self._tokenizer)
        has_tools = self._tools is not None
        names_calls = any(message.get("tool_calls") for message in self.messages)
        unknown = (None, self._tokenizer.unk_token_id)
        text = "".join(template.values()) if isinstance(template, dict) else template
        for role in {message["role"] for message in messages}:
            is_named = role in _ROLES or f"'{role}'" in text or f'"{role}"' in text
            if not is_named and self._tokenizer.convert_tokens_to_ids(f"<|{role}|>") in unknown:
                raise UserError(
                    f"model.chat_template: {in_use} does not name the role {role} of a message; use one of "
                    f"{', '.join(_ROLES)}"
                )
            # Some models have several templates.
            if _drops(self._tokenizer, str(template), role, names_calls or has_tools, has_tools):
                raise UserError(
                    f"model.chat_template: {in_use} drops messages of the role {role}, which the policy would not see"
                )

    def _whole(self) -> list[int]:
        """Return the tokens of all messages, up to where the next reply begins.

        Some templates refuse replies with their own special tokens (the channels of gpt-oss): they get the text.
        """
        try:
            return self._tokens_of(self.messages)
        except UserError:
            if not self._bare:
                raise
        bare = list(self.messages)
        for index, text in self._bare:
            bare[index] = {**bare[index], "content": text}
        return self._tokens_of(bare)

    def _tokens_of(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of all messages.

        Some templates write answers of tools to calls alone. There a reply whose calls could not be read gets some.
        """
        write = functools.partial(render_text, self._tokenizer, add_generation_prompt=True, tools=self._tools)
        plain = messages if self._tools is None else split_tools(messages)[0]
        named = plain if self._tools is None else with_answered_calls(plain)
        text = None
        if named != plain:
            with contextlib.suppress(UserError):
                text = write(plain)
            answers = [message["content"].strip() for message in plain if message["role"] == "tool"]
            text = text if text is not None and all(answer in text for answer in answers) else None
        return encode(self._tokenizer, write(named) if text is None else text, self._limit)

    def _begin(self, token_ids: list[int]) -> None:
        self.token_ids = list(token_ids)
        """The prompt of the next reply."""
        self._replies: list[tuple[int, Completion]] = []
        """Where each reply begins, and the reply."""

    def fork(self, token_ids: Sequence[int] | None = None) -> Conversation:
        """Return a copy, which can continue in another way.

        Args:
            token_ids: of this conversation, if `forget_tokens` was called.
        """
        other = copy.copy(self)
        vars(other).update({name: list(value) for name, value in vars(self).items() if isinstance(value, list)})
        if token_ids is not None:
            other.token_ids = list(token_ids)
        return other

    def forget_tokens(self) -> None:
        """Free the tokens, which the caller keeps. After that, `samples` are no longer known."""
        self.token_ids, self._replies, self._earlier = [], [], []

    def add_reply(self, completion: Completion) -> Message:
        """Append the tokens of a reply; return it as a message."""
        prompt, said = self.token_ids, completion.token_ids.tolist()
        self._replies.append((len(prompt), completion))
        self.token_ids = [*prompt, *said]
        text = reply_text(self._tokenizer, said, completion.finish_reason == "stop")
        reply: Message = {"role": "assistant", "content": text}
        if self._reader is not None and self._tools and completion.finish_reason != "length":  # else it is cut
            reply = self._reader.reply(said, prompt, text, self._tools)
        bare = self._tokenizer.decode(said, skip_special_tokens=True)
        if bare != text and reply["content"] == text:
            self._bare.append((len(self.messages), bare))
        self.messages.append(reply)
        return self.messages[-1]

    def add_messages(self, messages: Sequence[Message], max_tokens: int) -> bool:
        """Append messages that another reply will follow.

        Returns whether the prompt of that reply has at most `max_tokens` tokens; if not, no tokens are added.
        """
        reply = outline(self.messages[-1], messages, self._tools)
        self.messages += messages
        self._check_roles(messages)
        try:
            added = self._bridge(reply, messages)
            self._outline += [reply, *messages]
            whole = self._whole() if added is None else [*self.token_ids, *added]
        except TextTooLong:
            return False
        if len(whole) > max_tokens:
            return False
        if added is None:
            self._earlier.append(sample_of(self.token_ids, self._replies))
            self._begin(whole)
        else:
            self.token_ids = whole
        return True

    def _bridge(self, reply: Message, messages: Sequence[Message]) -> list[int] | None:
        """Return the tokens between the last reply and the next one; None if the template does not write them so.

        The messages so far must be rendered in the same way with the reply and the new messages after them. The text
        after the reply must begin with the stop token in which the policy has ended it: a token, at which the
        tokenizer splits any text.
        """
        write = functools.partial(render_text, self._tokenizer, tools=self._tools)
        try:
            before = write(self._outline, add_generation_prompt=False)
            after = write([*self._outline, reply, *messages], add_generation_prompt=True)
        except UserError:
            if reply.get("tool_calls"):  # more of them than the template can write
                return None
            raise
        if not after.startswith(before):
            return None
        _, found, rest = after[len(before) :].partition(REPLY_MARK)
        if not found:
            return None
        tokens = encode(self._tokenizer, rest, self._limit)
        last = self.token_ids[-1]
        if not reply.get("tool_calls"):
            return tokens[1:] if tokens[:1] == [last] else None
        closed = write([*self._outline, reply], add_generation_prompt=False)
        end = closed[len(before) :].partition(REPLY_MARK)[2]  # of the calls; the stop token may be the next message's
        stop = self._tokenizer.added_tokens_decoder.get(last)
        if stop is None or last not in tokens or not end.startswith(rest.partition(stop.content)[0]):
            return None
        return tokens[tokens.index(last) + 1 :]

    def samples(self) -> list[Sample]:
        """Return the training data: one sample, unless the history had to be rendered again."""
        return [*self._earlier, sample_of(self.token_ids, self._replies)]


@functools.lru_cache(maxsize=64)
def _drops(tokenizer: Any, template: str, role: str, has_calls: bool, has_tools: bool) -> bool:
    """Return whether a chat template writes nothing of what a message of a role says.

    Args:
        template: that of the tokenizer.
        has_calls: replies name their calls. Else these are a part of their text.
        has_tools: the template describes tools. Some tokenizers have another template then.
    """
    before: list[Message] = {"user": [], "system": []}.get(role, [{"role": "user", "content": "x"}])
    answer: Message = {"role": role, "content": REPLY_MARK}
    if role == "tool":
        call = {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": {}}}
        before = [*before, {"role": "assistant", "content": "y", **({"tool_calls": [call]} if has_calls else {})}]
        answer |= {"tool_call_id": "call_0", "name": "f"} if has_calls else {}
    after = [{"role": "user", "content": "x"}] if role in ("system", "assistant") else []
    try:
        tools = [PROBE_TOOL] if has_tools else None
        text = render_text(tokenizer, [*before, answer, *after], add_generation_prompt=True, tools=tools)
    except UserError:  # in this place: the conversation itself is what counts
        return False
    return REPLY_MARK not in text


def sample_of(token_ids: Sequence[int] | np.ndarray, replies: Sequence[tuple[int, Completion]]) -> Sample:
    """Return the sample of a conversation.

    Args:
        token_ids: of the whole conversation.
        replies: that are trained: where each begins, and the reply.
    """
    tokens = np.asarray(token_ids, np.int32)
    mask, logprobs = np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.float32)
    spans: list[tuple[int, int]] = []
    versions: list[int] = []
    for start, reply in replies:
        where = slice(start, start + len(reply.token_ids))
        mask[where], logprobs[where] = 1.0, reply.logprobs
        versions += reply.weight_versions
        spans += reply.version_spans or [(reply.weight_versions[1], len(reply.token_ids))]
    oldest_and_newest = (min(versions), max(versions)) if versions else (0, 0)
    return Sample(tokens, mask, logprobs, oldest_and_newest, tuple(spans) if len(set(versions)) > 1 else ())
