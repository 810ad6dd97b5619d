"""Texts as tokens, within limits (tokenising 30 MB takes gigabytes and minutes), and replies of the policy as text."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

_SHORT = 1 << 16
"""Texts of up to this many characters are always encoded. A tokenizer that drops characters, such as repeated blanks,
can make few tokens from a text that is longer than `max_characters`."""
_MOST_ANSWERS = 1000
"""Reference answers that `changed_answer` tries, spread over the data: so many take well below a second."""


class TextTooLong(Exception):
    """A text certainly has more tokens than allowed."""

    def __init__(self, characters: int):
        super().__init__(f"{characters:,} characters")


def max_characters(tokenizer: Any, max_tokens: int) -> int:
    """Return the number of characters above which a text certainly has more than `max_tokens` tokens."""
    return max(_SHORT, max_tokens * _longest_token(tokenizer))


def is_plain(tokenizer: Any) -> bool:
    """Return whether a tokenizer is one of the library's fast ones, which encodes texts in its own way."""
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast  # late, because the import takes seconds

    kind = type(tokenizer)
    return (
        isinstance(tokenizer, PreTrainedTokenizerFast)
        and kind.__module__.startswith("transformers.")
        and kind.encode is PreTrainedTokenizerBase.encode
        and kind._encode_plus is PreTrainedTokenizerFast._encode_plus
        and kind.apply_chat_template is PreTrainedTokenizerBase.apply_chat_template
    )


def encode_together(tokenizer: Any, texts: Sequence[str]) -> list[list[int]] | None:
    """Return what a plain tokenizer encodes each text as, in half of the time; None: some are long."""
    if max(map(len, texts)) > _SHORT:
        return None
    tokenizer.encode("", add_special_tokens=False)  # sets what a text is encoded with, such as no padding
    found = tokenizer.backend_tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
    return [encoding.ids for encoding in found]


def encode(tokenizer: Any, text: str, limit: float, tokens: list[int] | None = None) -> list[int]:
    """Return the tokens of `text`, without special tokens around it.

    Some tokenizers write the start of a text all the same. If the chat template has written it, too, it stands once.

    Args:
        tokens: what `encode_together` has returned for the text.

    Raises:
        TextTooLong: the text has more than `limit` characters.
    """
    if len(text) > limit:
        raise TextTooLong(len(text))
    if tokens is None:
        tokens = tokenizer.encode(text, add_special_tokens=False)
    start = tokenizer.bos_token_id
    is_twice = start is not None and tokens[:2] == [start, start] and not text.startswith(2 * tokenizer.bos_token)
    return tokens[is_twice:]


def beginning(tokenizer: Any, text: str, max_tokens: int) -> str:
    """Return the beginning of `text` that contains at least its first `max_tokens` tokens."""
    if len(text) <= 2 * _SHORT:
        return text
    return text[: 2 * max_characters(tokenizer, max_tokens)]  # twice, because a cut can change the last token


@functools.lru_cache(maxsize=4)
def _longest_token(tokenizer: Any) -> int:
    """Return the length of the longest token in the vocabulary, in characters or in bytes (at least as many)."""
    return max(map(len, tokenizer.get_vocab()), default=1)


def reply_text(tokenizer: Any, token_ids: Sequence[int], has_ended: bool) -> str:
    """Return the text of a reply, with its special tokens, such as `<answer>` or the marks of a thought.

    The token that has ended a reply is left out, and so are the tokenizer's tokens for end and padding.
    """
    ids = [int(token) for token in token_ids]
    if has_ended and ids and ids[-1] in _added_tokens(tokenizer):  # a piece of a word ends a reply only at a stop text
        ids.pop()
    unseen = (tokenizer.eos_token_id, tokenizer.pad_token_id)
    return tokenizer.decode([token for token in ids if token not in unseen], skip_special_tokens=False)


def changed_answer(
    tokenizer: Any, rows: Sequence[Any], answer_of: Callable[[Any], Any] = lambda row: row
) -> tuple[int, str, str] | None:
    """Return the index of a reference answer that the tokenizer changes, the answer, and what becomes of it.

    The policy cannot write such an answer. Blanks around it do not count. Of many answers, some are tried.

    Args:
        answer_of: returns the answer of a row. What is no text is left out.

    Returns:
        None if there is none.
    """
    for index in range(0, len(rows), max(1, -(-len(rows) // _MOST_ANSWERS))):
        answer = answer_of(rows[index])
        if not isinstance(answer, str):
            continue
        text = tokenizer.decode(tokenizer.encode(answer, add_special_tokens=False), skip_special_tokens=False)
        if text.strip() != answer.strip():
            return index, answer, text
    return None


@functools.lru_cache(maxsize=4)
def _added_tokens(tokenizer: Any) -> frozenset[int]:
    """Return the ids of the added tokens. Some tokenizers have thousands, and build the table at each call."""
    return frozenset(tokenizer.added_tokens_decoder)
