"""How long a text may be before it is encoded: tokenising a text of 30 MB takes gigabytes and minutes."""

from __future__ import annotations

import functools
from typing import Any

_SHORT = 1 << 16
"""Texts of up to so many characters are always encoded. A tokenizer that leaves characters out, such as repeated
blanks, can make few tokens of a text that is longer than `most_characters`."""


class TextTooLong(Exception):
    """A text certainly has more tokens than it may have."""

    def __init__(self, characters: int):
        super().__init__(f"{characters:,} characters")


def most_characters(tokenizer: Any, max_tokens: int) -> int:
    """Return the number of characters beyond which a text certainly has more than `max_tokens` tokens."""
    return max(_SHORT, max_tokens * _longest_token(tokenizer))


def encode(tokenizer: Any, text: str, limit: float) -> list[int]:
    """Return the tokens of `text`, without those that a tokenizer adds around it.

    Raises:
        TextTooLong: it has more than `limit` characters.
    """
    if len(text) > limit:
        raise TextTooLong(len(text))
    return tokenizer.encode(text, add_special_tokens=False)


def beginning(tokenizer: Any, text: str, max_tokens: int) -> str:
    """Return as much of `text` as its first `max_tokens` tokens need, or more."""
    if len(text) <= 2 * _SHORT:
        return text
    return text[: 2 * most_characters(tokenizer, max_tokens)]  # twice: the last token may be another one


@functools.lru_cache(maxsize=4)
def _longest_token(tokenizer: Any) -> int:
    """Return the length of the longest token in the vocabulary: in characters, or, which is no less, in bytes."""
    return max(map(len, tokenizer.get_vocab()), default=1)
