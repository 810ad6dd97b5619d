"""Data sets made on the spot, the same on every machine and for every run seed."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from trainer.errors import UserError
from trainer.keyed import key, permutation

_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def generate(name: str, args: Mapping[str, int], size: int, split: str) -> list[dict[str, str]]:
    """`size` examples with `prompt` and `answer`; those of `train` and `val` never meet.

    Args:
        name: `arithmetic` (sums of two numbers up to `max_value`, 99) or `reverse_text` (words of
            `min_letters` to `max_letters`, 4 to 10, and their reversal).
        split: `train` or `val`.

    Raises:
        UserError: there are not so many different examples.
    """
    make = {"arithmetic": _arithmetic, "reverse_text": _reverse_text}[name]
    examples = make(args, size, split)
    if len(examples) < size:
        raise UserError(f"data.{split}_size={size}: data.generator={name} with these data.generator_args has only "
                        f"{len(examples)} different examples for {split}")  # fmt: skip
    return examples


def _arithmetic(args: Mapping[str, int], size: int, split: str) -> list[dict[str, str]]:
    numbers = args.get("max_value", 99) + 1
    order = permutation(numbers * numbers, "arithmetic", numbers)
    held_out = len(order) // 5  # a fifth of all sums is for validation
    chosen = order[:held_out] if split == "val" else order[held_out:]
    pairs = [divmod(int(i), numbers) for i in chosen[:size]]
    return [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in pairs]


def _reverse_text(args: Mapping[str, int], size: int, split: str) -> list[dict[str, str]]:
    low, high = args.get("min_letters", 4), args.get("max_letters", 10)
    if not 1 <= low <= high:
        raise UserError(f"data.generator_args: min_letters={low} and max_letters={high} leave no word")
    words: dict[str, None] = {}
    for attempt in range(20 * size + 1000):
        if len(words) == size:
            break
        random = np.random.Philox(key=key("reverse_text", attempt)).random_raw(high + 1)
        length = low + int(random[0] % (high - low + 1))
        word = "".join(_LETTERS[int(r % 26)] for r in random[1 : length + 1])
        # The word itself says which split it is in, so the splits cannot overlap whatever their sizes.
        if (key("split", word) % 5 == 0) == (split == "val"):
            words[word] = None
    return [{"prompt": word, "answer": word[::-1]} for word in words]
