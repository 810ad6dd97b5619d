"""Packed supervised examples: several in a row, loss on the answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trainer.config import DataConfig
from trainer.data.datasets import Example, as_messages, read_examples, render
from trainer.errors import UserError
from trainer.keyed import permutation
from trainer.parallel.batching import Batch

Encoded = tuple[list[int], list[float]]
"""Token ids and loss mask (1 = token to be learnt) of one example."""


def encode(example: Example, tokenizer: Any, system_prompt: str | None, max_length: int) -> Encoded:
    """The example as a chat, with loss on the answer and the tokens that end it; cut to `max_length`."""
    messages = as_messages(example["prompt"], system_prompt)
    prompt = render(tokenizer, messages, add_generation_prompt=True)
    answer = tokenizer.encode(example["answer"], add_special_tokens=False) + [tokenizer.eos_token_id]
    return (prompt + answer)[:max_length], ([0.0] * len(prompt) + [1.0] * len(answer))[:max_length]


def load_encoded(data: DataConfig, tokenizer: Any, max_length: int) -> list[Encoded]:
    """The training examples, encoded; those whose answer is cut off whole are left out.

    Raises:
        UserError: the data cannot be read (see `read_examples`), or no example has room for its answer.
    """
    examples = read_examples(data, "train")
    encoded = (encode(e, tokenizer, data.system_prompt, max_length) for e in examples)
    kept = [(ids, mask) for ids, mask in encoded if any(mask)]
    if not kept:
        raise UserError(f"sft.max_length={max_length}: all {len(examples)} training prompts fill it, which leaves no "
                        "answer to learn")  # fmt: skip
    return kept


class PackedBatches:
    """Batches of rows filled with whole examples; each batch is a function of (seed, step) alone.

    Every step draws its own permutation of the examples and fills its rows in that order, each example
    going to the current row or opening the next, until the rows are full.
    """

    def __init__(self, examples: Sequence[Encoded], seed: int, batch_size: int, max_length: int, pad_id: int):
        assert examples
        self._examples = examples
        self._seed = seed
        self._shape = (batch_size, max_length)
        self._pad_id = pad_id

    def batch(self, step: int) -> Batch:
        """`input_ids`, `position_ids` (restarting with each example), `loss_mask` (1 = learn this token):
        `(B, L)`; `lengths` `(B,)`. Padding is an example of its own, without loss."""
        rows, width = self._shape
        ids = np.full(self._shape, self._pad_id, dtype=np.int64)
        positions = np.zeros(self._shape, dtype=np.int64)
        mask = np.zeros(self._shape, dtype=np.float32)
        row = column = 0
        for index in permutation(len(self._examples), self._seed, "sft", step):
            tokens, learn = self._examples[index]
            if column + len(tokens) > width:
                positions[row, column:] = np.arange(width - column)
                row, column = row + 1, 0
                if row == rows:
                    break
            span = slice(column, column + len(tokens))
            ids[row, span], mask[row, span] = tokens, learn
            positions[row, span] = np.arange(len(tokens))
            column += len(tokens)
        for rest in range(row, rows):  # the data set was too small to fill them
            start = column if rest == row else 0
            positions[rest, start:] = np.arange(width - start)
        return {
            "input_ids": ids,
            "position_ids": positions,
            "loss_mask": mask,
            "lengths": np.full(rows, width, dtype=np.int64),
        }
