"""The tokens of a conversation. What the policy has sampled is kept token by token, and never rendered again."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from trainer.data.datasets import render, render_text
from trainer.data.limits import TextTooLong, encode
from trainer.environments.base import Message
from trainer.environments.rendering import REPLY_MARK, ChatRenderer
from trainer.episodes import Sample
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
        limit: texts with more characters are too long, and not encoded (see `trainer.data.limits`).
        renderer: writes and reads in place of the chat template.

    Raises:
        UserError: the chat template refuses the messages, or drops them.
        TextTooLong: the first messages are too long.
    """

    def __init__(
        self,
        tokenizer: Any,
        messages: Sequence[Message],
        limit: float = math.inf,
        renderer: ChatRenderer | None = None,
    ):
        self._tokenizer = tokenizer
        self._limit = limit
        self._renderer = renderer
        self._reply_length = 0  # tokens of the last reply
        self.messages: list[Message] = list(messages)
        self._outline: list[Message] = list(messages)  # with `REPLY_MARK` in place of what the policy said
        self._earlier: list[Sample] = []
        self._check_roles(messages)
        self._begin(self._whole())

    def _check_roles(self, messages: Sequence[Message]) -> None:
        """Check that the template knows the roles of messages, and writes what these say.

        With a renderer, too, the template writes all that does not just follow a reply.

        Raises:
            UserError: it drops them, or would write a role that neither it nor other models have.
        """
        template = self._tokenizer.chat_template
        in_use = f"the chat template in use (that of {self._tokenizer.name_or_path}, if the key is not set)"
        for role in {message["role"] for message in messages}:
            if role not in _ROLES and not self._names(role):
                raise UserError(
                    f"model.chat_template: {in_use} does not name the role {role} of a message; use one of "
                    f"{', '.join(_ROLES)}"
                )
            if _drops(self._tokenizer, str(template), role, self._renderer is not None):  # some models have several
                raise UserError(
                    f"model.chat_template: {in_use} drops messages of the role {role}, which the policy would not see"
                )

    def _names(self, role: str) -> bool:
        """Return whether the template names a role, or the tokenizer has a token for it."""
        template, unknown = str(self._tokenizer.chat_template), (None, self._tokenizer.unk_token_id)
        has_token = self._tokenizer.convert_tokens_to_ids(f"<|{role}|>") not in unknown
        return has_token or any(quoted in template for quoted in (f"'{role}'", f'"{role}"'))

    def _whole(self) -> list[int]:
        """Return the tokens of all messages, up to where the next reply begins."""
        if self._renderer is not None:
            return self._renderer.prompt(self.messages)
        return render(self._tokenizer, self.messages, add_generation_prompt=True, limit=self._limit)

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
        prompt = self.token_ids.copy() if self._renderer is not None else []
        self._reply_length = len(completion.token_ids)
        self._replies.append((len(self.token_ids), completion))
        self.token_ids += completion.token_ids.tolist()
        text = self._tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        reply: Message = {"role": "assistant", "content": text}
        if self._renderer is not None:
            reply = self._renderer.reply(completion.token_ids.tolist(), prompt, text, self.messages)
        self.messages.append(reply)
        return self.messages[-1]

    def add_messages(self, messages: Sequence[Message], max_tokens: int) -> bool:
        """Append messages that another reply will follow.

        Returns whether the prompt of that reply has at most `max_tokens` tokens; if not, no tokens are added.
        """
        self.messages += messages
        self._check_roles(messages)
        try:
            return self._add_tokens(messages, max_tokens)
        except TextTooLong:
            return False

    def _add_tokens(self, messages: Sequence[Message], max_tokens: int) -> bool:
        added = self._bridge(messages)
        self._outline += [{"role": "assistant", "content": REPLY_MARK}, *messages]
        if added is not None:
            if len(self.token_ids) + len(added) > max_tokens:
                return False
            self.token_ids += added
            return True
        whole = self._whole()
        if len(whole) > max_tokens:
            return False
        self._earlier.append(sample_of(self.token_ids, self._replies))
        self._begin(whole)
        return True

    def _bridge(self, messages: Sequence[Message]) -> list[int] | None:
        """Return the tokens between the last reply and the next one; None if the template does not write them so.

        The messages so far must be rendered in the same way with the reply and the new messages after them. The text
        after the reply must begin with the stop token in which the policy has ended it: a token, at which the
        tokenizer splits any text.
        """
        if self._renderer is not None:
            end = len(self.token_ids) - self._reply_length
            return self._renderer.bridge(self.token_ids[:end], self.token_ids[end:], messages, self.messages)
        before = render_text(self._tokenizer, self._outline, add_generation_prompt=False)
        reply = {"role": "assistant", "content": REPLY_MARK}
        after = render_text(self._tokenizer, [*self._outline, reply, *messages], add_generation_prompt=True)
        if not after.startswith(before):
            return None
        _, found, rest = after[len(before) :].partition(REPLY_MARK)
        tokens = encode(self._tokenizer, rest, self._limit)
        return tokens[1:] if found and tokens[:1] == self.token_ids[-1:] else None

    def samples(self) -> list[Sample]:
        """Return the training data: one sample, unless the history had to be rendered again."""
        return [*self._earlier, sample_of(self.token_ids, self._replies)]


@functools.lru_cache(maxsize=64)
def _drops(tokenizer: Any, template: str, role: str, has_calls: bool) -> bool:
    """Return whether a chat template writes nothing of what a message of a role says.

    Args:
        template: that of the tokenizer.
        has_calls: replies name their calls. Else these are a part of their text.
    """
    before: list[Message] = {"user": [], "system": []}.get(role, [{"role": "user", "content": "x"}])
    answer: Message = {"role": role, "content": REPLY_MARK}
    if role == "tool":
        call = {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": {}}}
        before = [*before, {"role": "assistant", "content": "y", **({"tool_calls": [call]} if has_calls else {})}]
        answer |= {"tool_call_id": "call_0", "name": "f"} if has_calls else {}
    after = [{"role": "user", "content": "x"}] if role in ("system", "assistant") else []
    try:
        text = render_text(tokenizer, [*before, answer, *after], add_generation_prompt=True)
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
