"""Limits on the length of a text before it is encoded: tokenising 30 MB takes gigabytes and minutes."""

from __future__ import annotations

import functools
from typing import Any

_SHORT = 1 << 16
"""Texts of up to this many characters are always encoded. A tokenizer that drops characters, such as repeated blanks,
can make few tokens from a text that is longer than `max_characters`."""


class TextTooLong(Exception):
    """A text certainly has more tokens than allowed."""

    def __init__(self, characters: int):
        super().__init__(f"{characters:,} characters")


def max_characters(tokenizer: Any, max_tokens: int) -> int:
    """Return the number of characters above which a text certainly has more than `max_tokens` tokens."""
    return max(_SHORT, max_tokens * _longest_token(tokenizer))


def encode(tokenizer: Any, text: str, limit: float) -> list[int]:
    """Return the tokens of `text`, without special tokens around it.

    Some tokenizers write the start of a text all the same. If the chat template has written it, too, it stands once.

    Raises:
        TextTooLong: the text has more than `limit` characters.
    """
    if len(text) > limit:
        raise TextTooLong(len(text))
    tokens, start = tokenizer.encode(text, add_special_tokens=False), tokenizer.bos_token_id
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
