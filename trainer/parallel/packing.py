"""Packing: sequences follow one another in one row, so that the model computes no padding, and no prompt twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.parallel.collectives import AxisGroup

_SHORT = 64  # tokens; sequences up to this length share a bucket
_SIMILAR = 0.75  # the shortest sequence of any other bucket, as a share of the longest


class _Take(torch.autograd.Function):
    """See `take`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.shape = rows.shape
        return rows.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (places,), grad = ctx.saved_tensors, grads[0]
        total = grad.new_zeros(ctx.shape, dtype=torch.promote_types(grad.dtype, torch.float32))
        if grad.is_cuda:  # each of the two adds in the same order every time on one kind of device alone
            total.index_put_((places,), grad.to(total.dtype), accumulate=True)
        else:
            total.index_add_(0, places, grad.to(total.dtype))
        return total.to(grad.dtype), None


def take(rows: Tensor, places: Tensor) -> Tensor:
    """Return `rows[places]`, whose gradients are added up in float32, and eagerly always in the same order.

    Args:
        rows: `(N, ...)`.
        places: `(n,)`; a place may repeat.
    """
    return _Take.apply(rows, places)


@dataclass(frozen=True)
class Bucket:
    """Neighbouring sequences of similar length, which attention computes together."""

    lengths: tuple[int, ...]
    """Number of each sequence's own tokens: those that it does not share."""
    shared: int = 0
    """Number of tokens that each sequence has before its own ones."""

    @property
    def tokens(self) -> int:
        """Number of own tokens of the bucket."""
        return sum(self.lengths)

    @property
    def keys(self) -> int:
        """Number of all tokens of the bucket's sequences."""
        return sum(self.lengths) + len(self.lengths) * self.shared

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

    A sequence may share its first tokens with the last sequence before it that shares none, its leader. The row has
    these tokens only once, in the leader. What the model computes of them is the same for both, because no token
    attends to later ones.

    Args:
        lengths: number of tokens of each sequence, at least 1.
        device: where this object puts its tensors.
        context: the ranks that share the row: each has a part of its tokens, of the same size. None: this rank has all.
        shared: number of tokens that each sequence takes from its leader, less than its length; 0 for leaders. None:
            no sequence takes any.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        device: str | torch.device,
        context: AxisGroup | None = None,
        shared: Sequence[int] | None = None,
    ):
        self.lengths = tuple(int(length) for length in lengths)
        self.shared = tuple(int(n) for n in shared) if shared is not None else (0,) * len(self.lengths)
        self.device = device
        self.context = context
        self.longest = max(self.lengths)
        self.shares = shared is not None  # not whether any does: compiled blocks have one graph for all micro-batches
        self.own_lengths = tuple(length - n for length, n in zip(self.lengths, self.shared, strict=True))
        """Number of tokens of each sequence that the row has for it alone."""
        assert min(self.own_lengths) > 0, "a sequence has a token that it does not share"
        self.longest_own = max(self.own_lengths)
        self.tokens = sum(self.own_lengths)

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
        starts = np.repeat(self._starts - self.shared, self.own_lengths)
        return self._tensor((np.arange(self.tokens) - starts)[None])

    @cached_property
    def boundaries(self) -> Tensor:
        """`(B + 1,)` int32: the index of each sequence's first own token, and N."""
        return self._tensor(np.append(self._starts, self.tokens).astype(np.int32))

    @cached_property
    def key_boundaries(self) -> Tensor:
        """`(B + 1,)` int32: the boundaries in a row of whole sequences, in which shared tokens are repeated."""
        return self._tensor(np.append(0, np.cumsum(self.lengths)).astype(np.int32))

    @cached_property
    def key_places(self) -> Tensor:
        """`(sum of lengths,)`: the index in the row of each token of one whole sequence after another."""
        return self._tensor(self._places[np.arange(self.longest) < np.asarray(self.lengths)[:, None]])

    @cached_property
    def sizes(self) -> Tensor:
        """`(2, B)` in host memory: the lengths of the sequences, and how many tokens each takes from its leader."""
        return torch.tensor((self.lengths, self.shared))

    def prepare(self) -> None:
        """Compute the tensors that compiled blocks read, because a compiled graph cannot compute them."""
        _ = self.boundaries, self.sizes
        if self.shares:
            _ = self.key_boundaries, self.key_places

    @cached_property
    def buckets(self) -> list[Bucket]:
        """Buckets of sequences of similar length.

        Attention pads only within a bucket, so its cost is close to the sum of the squared lengths.
        """
        buckets: list[Bucket] = []
        group, common = [self.own_lengths[0]], (0, 0)
        low = high = self.own_lengths[0]
        leader = 0
        for number, (length, shared) in enumerate(zip(self.own_lengths[1:], self.shared[1:], strict=True), start=1):
            leader = leader if shared else number
            source = (leader, shared) if shared else (0, 0)
            low, high = min(low, length), max(high, length)
            if source != common or (high > _SHORT and low < _SIMILAR * high):
                buckets.append(Bucket(tuple(group), common[1]))
                group, common, low, high = [], source, length, length
            group.append(length)
        return [*buckets, Bucket(tuple(group), common[1])]

    @cached_property
    def bucket_places(self) -> list[tuple[Tensor, Tensor]]:
        """The indices of each bucket's own tokens, `(tokens,)`, and of all, `(keys,)`, in its flattened padded rows."""
        return [(self._padded(bucket, 0), self._padded(bucket, bucket.shared)) for bucket in self.buckets]

    def _padded(self, bucket: Bucket, before: int) -> Tensor:
        lengths = np.asarray(bucket.lengths)[:, None] + before
        return self._tensor(np.flatnonzero(np.arange(bucket.longest + before) < lengths))

    def rows_of_next(self, values: Tensor) -> Tensor:
        """Return values `(1, N)`, each of which belongs to the next token, as padded rows `(B, longest)`.

        Entry t of a row is the value at token t - 1 of the sequence; it is 0 at t = 0 and in the padding.
        """
        places = self.previous_places
        return take(F.pad(values[0], (0, 1)), places.flatten()).view(places.shape)

    @cached_property
    def places(self) -> Tensor:
        """`(B, longest)`: the index in the row of each token; N in the padding."""
        return self._tensor(self._places)

    @cached_property
    def previous_places(self) -> Tensor:
        """`(B, longest)`: the index in the row of the previous token of each token; N if there is none."""
        inside = np.arange(self.longest - 1) < np.asarray(self.lengths)[:, None] - 1
        previous = np.where(inside, self._places[:, :-1], self.tokens)
        return self._tensor(np.pad(previous, ((0, 0), (1, 0)), constant_values=self.tokens))

    @cached_property
    def has_previous(self) -> Tensor:
        """`(B, longest)` bool: tokens that are not the first of their sequence; not the padding."""
        return self.previous_places < self.tokens

    @cached_property
    def _starts(self) -> np.ndarray:
        """`(B,)`: the index of each sequence's first own token."""
        return np.cumsum((0, *self.own_lengths[:-1]))

    @cached_property
    def _places(self) -> np.ndarray:
        columns, shared = np.arange(self.longest), np.asarray(self.shared)[:, None]
        leaders = self._starts[np.maximum.accumulate(np.where(shared[:, 0] == 0, np.arange(len(shared)), 0))]
        own = (self._starts[:, None] - shared) + columns
        places = np.where(columns < shared, leaders[:, None] + columns, own)
        return np.where(columns < np.asarray(self.lengths)[:, None], places, self.tokens)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)
