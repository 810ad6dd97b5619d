"""The text of what a policy has sampled, as rewards, environments, agents and records get it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

_MOST_ANSWERS = 1000
"""Reference answers that `changed_answer` tries, spread over the data: so many take well below a second."""


def reply_text(tokenizer: Any, token_ids: Sequence[int], has_ended: bool) -> str:
    """Return the text of a reply, with its special tokens, such as `<answer>` or the marks of a thought.

    The token that has ended a reply is left out, and so are the tokenizer's tokens for end and padding.

    Args:
        has_ended: the policy has ended it: then the last token is the end.
    """
    ids = [int(token) for token in token_ids]
    if has_ended and ids and ids[-1] in _added_tokens(tokenizer):  # a piece of a word ends a reply only at a stop text
        ids.pop()
    unseen = (tokenizer.eos_token_id, tokenizer.pad_token_id)
    return tokenizer.decode([token for token in ids if token not in unseen], skip_special_tokens=False)


def changed_answer(tokenizer: Any, answers: Sequence[str]) -> tuple[int, str] | None:
    """Return the index of a reference answer that the tokenizer changes, and what becomes of it; None: there is none.

    The policy cannot write such an answer. Blanks around it do not count. Of many answers, some are tried.
    """
    for index in range(0, len(answers), max(1, -(-len(answers) // _MOST_ANSWERS))):
        text = tokenizer.decode(tokenizer.encode(answers[index], add_special_tokens=False), skip_special_tokens=False)
        if text.strip() != answers[index].strip():
            return index, text
    return None


@functools.lru_cache(maxsize=4)
def _added_tokens(tokenizer: Any) -> frozenset[int]:
    """Return the tokens that are no pieces of text. Some tokenizers have thousands, and make the table anew."""
    return frozenset(tokenizer.added_tokens_decoder)
