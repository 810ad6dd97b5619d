"""Packing: sequences follow one another in one row, so that the model computes no padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

_SHORT = 64  # tokens; sequences up to this length share a bucket
_SIMILAR = 0.75  # the shortest sequence of any other bucket, as a share of the longest


@dataclass(frozen=True)
class Bucket:
    """Neighbouring sequences of similar length, which attention computes together."""

    first: int
    """Index in the row of the bucket's first token."""
    lengths: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Number of tokens of the bucket."""
        return sum(self.lengths)

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def is_even(self) -> bool:
        """Whether all sequences have the same length."""
        return min(self.lengths) == self.longest


class Packing:
    """The boundaries of the sequences in a row of N tokens.

    A model gets the row, the restarting positions and this object. Its attention keeps the sequences apart
    (see `trainer.models.attention`).

    Args:
        lengths: number of tokens of each sequence, at least 1.
        device: where this object puts its tensors.
    """

    def __init__(self, lengths: Sequence[int], device: str | torch.device):
        self.lengths = tuple(int(length) for length in lengths)
        self.device = device
        self.longest = max(self.lengths)
        self.tokens = sum(self.lengths)

    @cached_property
    def position_ids(self) -> Tensor:
        """`(1, N)`: the position of each token in its sequence, from 0."""
        starts = np.repeat(self._starts, self.lengths)
        return self._tensor((np.arange(self.tokens) - starts)[None])

    @cached_property
    def boundaries(self) -> Tensor:
        """`(B + 1,)` int32: the index of each sequence's first token, and N."""
        return self._tensor(np.append(self._starts, self.tokens).astype(np.int32))

    @cached_property
    def buckets(self) -> list[Bucket]:
        """Buckets of sequences of similar length.

        Attention pads only within a bucket, so its cost is close to the sum of the squared lengths.
        """
        buckets: list[Bucket] = []
        first, group = 0, [self.lengths[0]]
        low = high = self.lengths[0]
        for length in self.lengths[1:]:
            low, high = min(low, length), max(high, length)
            if high > _SHORT and low < _SIMILAR * high:
                buckets.append(Bucket(first, tuple(group)))
                first, group, low, high = first + sum(group), [], length, length
            group.append(length)
        return [*buckets, Bucket(first, tuple(group))]

    @cached_property
    def bucket_places(self) -> list[Tensor]:
        """`(tokens,)` for each bucket: the indices of its tokens in its flattened padded rows."""
        places = []
        for bucket in self.buckets:
            real = np.arange(bucket.longest) < np.asarray(bucket.lengths)[:, None]
            places.append(self._tensor(np.flatnonzero(real)))
        return places

    def rows_of_next(self, values: Tensor) -> Tensor:
        """Return values `(1, N)`, each of which belongs to the next token, as padded rows `(B, longest)`.

        Entry t of a row is the value at token t - 1 of the sequence; it is 0 at t = 0 and in the padding.
        """
        return F.pad(values[0], (0, 1))[self.previous_places]

    @cached_property
    def previous_places(self) -> Tensor:
        """`(B, longest)`: the index in the row of the previous token of each token; N if there is none."""
        columns = np.arange(self.longest)
        inside = (columns > 0) & (columns < np.asarray(self.lengths)[:, None])
        return self._tensor(np.where(inside, self._starts[:, None] + columns - 1, self.tokens))

    @cached_property
    def has_previous(self) -> Tensor:
        """`(B, longest)` bool: tokens that are not the first of their sequence; not the padding."""
        return self.previous_places < self.tokens

    @cached_property
    def _starts(self) -> np.ndarray:
        return np.cumsum((0, *self.lengths[:-1]))

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)
