"""Generated data sets. They are the same on every machine and for every run seed."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from trainer.errors import UserError
from trainer.seeding import derive_seed

_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def generate(name: str, args: Mapping[str, int], size: int, split: str) -> list[dict[str, str]]:
    """Return `size` examples with `prompt` and `answer`. No prompt is in both `train` and `val`.

    Args:
        name: `arithmetic` (sums of two numbers up to `max_value`, 99) or `reverse_text` (words of `min_letters` to
            `max_letters`, 4 to 10, and their reversal).
        split: `train` or `val`.

    Raises:
        UserError: an option is out of range, or there are fewer than `size` different examples.
    """
    sample = {"arithmetic": _sum, "reverse_text": _word}[name]
    examples: dict[str, str] = {}
    for attempt in range(20 * size + 1000):
        if len(examples) == size:
            break
        prompt, answer = sample(attempt, **args)
        # The prompt itself determines its split, so the splits cannot overlap for any sizes.
        if (derive_seed("split", prompt) % 5 == 0) == (split == "val"):
            examples[prompt] = answer
    if len(examples) < size:
        raise UserError(
            f"data.{split}_size={size}: data.synthetic={name} with these data.synthetic_args has only "
            f"{len(examples)} different examples for {split}"
        )
    return [{"prompt": prompt, "answer": answer} for prompt, answer in examples.items()]


def _sum(attempt: int, max_value: int = 99) -> tuple[str, str]:
    if max_value < 0:
        raise UserError(f"data.synthetic_args: max_value={max_value} must be at least 0")
    a, b = (int(r % (max_value + 1)) for r in _random("arithmetic", attempt, 2))
    return f"{a}+{b}=", str(a + b)


def _word(attempt: int, min_letters: int = 4, max_letters: int = 10) -> tuple[str, str]:
    if not 1 <= min_letters <= max_letters:
        raise UserError(f"data.synthetic_args: min_letters={min_letters} and max_letters={max_letters} leave no word")
    first, *rest = _random("reverse_text", attempt, max_letters + 1)
    length = min_letters + int(first % (max_letters - min_letters + 1))
    word = "".join(_LETTERS[int(r % 26)] for r in rest[:length])
    return word, word[::-1]


def _random(name: str, attempt: int, count: int) -> np.ndarray:
    return np.random.Philox(key=derive_seed(name, attempt)).random_raw(count)
