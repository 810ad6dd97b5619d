"""Packing: sequences follow one another in one row, so that the model computes no padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.parallel.collectives import Peers

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
        context: the ranks that share the row: each has a part of its tokens, of the same size. None: this rank has all.
    """

    def __init__(self, lengths: Sequence[int], device: str | torch.device, context: Peers | None = None):
        self.lengths = tuple(int(length) for length in lengths)
        self.device = device
        self.context = context
        self.longest = max(self.lengths)
        self.tokens = sum(self.lengths)

    @property
    def part(self) -> slice:
        """The tokens of the row that this rank has. The parts of the last ranks may reach beyond the row."""
        if self.context is None:
            return slice(0, self.tokens)
        size = -(-self.tokens // self.context.size)
        return slice(self.context.rank * size, (self.context.rank + 1) * size)

    def own(self, row: Tensor) -> Tensor:
        """Return this rank's part `(1, n)` of a row `(1, N)`, filled up with zeros beyond the row."""
        if self.context is None:
            return row
        part = self.part
        return F.pad(row, (0, max(0, part.stop - self.tokens)))[:, part]

    def whole(self, part: Tensor) -> Tensor:
        """Return the row `(1, N)` whose parts `(1, n)` the ranks have. All of them must compute the same with it."""
        if self.context is None:
            return part
        beyond = self.context.size * part.shape[1] - self.part.stop
        return self.context.total(F.pad(part, (self.part.start, beyond)))[:, : self.tokens]

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
    def sizes(self) -> Tensor:
        """`(B,)` in host memory: the lengths of the sequences."""
        return torch.tensor(self.lengths)

    def prepare(self) -> None:
        """Compute the tensors that compiled blocks read, because a compiled graph cannot compute them."""
        _ = self.boundaries, self.sizes

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
