"""Packing: sequences follow one another in one row, so that no padding and no prompt is computed twice."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.parallel.collectives import AxisGroup

_SHORT = 64  # tokens; sequences up to this length may be in the same bucket
_SIMILAR = 0.75  # smallest ratio of the shortest to the longest sequence in any other bucket


class _IndexSelect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, indices: Tensor) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.shape = rows.shape
        return rows.index_select(0, indices)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (indices,), grad = ctx.saved_tensors, grads[0]
        total = grad.new_zeros(ctx.shape, dtype=torch.promote_types(grad.dtype, torch.float32))
        if grad.is_cuda:  # on each device type, only one of the two operators adds in a fixed order
            total.index_put_((indices,), grad.to(total.dtype), accumulate=True)
        else:
            total.index_add_(0, indices, grad.to(total.dtype))
        return total.to(grad.dtype), None


def index_select(rows: Tensor, indices: Tensor) -> Tensor:
    """Return the rows `(N, ...)` with these indices `(n,)`, which may repeat. Gradients are summed in float32; without
    `torch.compile`, always in the same order."""
    return _IndexSelect.apply(rows, indices)


class Gather(torch.autograd.Function):
    """Select the rows at `indices`. No index repeats, so forward and backward only copy."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, indices: Tensor) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.size = len(rows)
        return rows.index_select(0, indices)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (indices,) = ctx.saved_tensors
        return grads[0].new_zeros(ctx.size, *grads[0].shape[1:]).index_copy_(0, indices, grads[0]), None


class Bucket:
    """Neighbouring sequences of similar length, which attention computes together.

    Args:
        lengths: number of tokens of each sequence after the shared prefix.
        prefix_length: number of tokens of the prefix that all share with their leader.
    """

    def __init__(self, lengths: Sequence[int], prefix_length: int):
        self.lengths = tuple(lengths)
        self.prefix_length = prefix_length
        self.tokens = sum(lengths)
        self.keys = self.tokens + len(lengths) * prefix_length  # number of their tokens with prefixes
        self.longest = max(lengths)
        self.is_even = min(lengths) == self.longest


class Packing:
    """The boundaries of the sequences in a row of N tokens.

    A model receives the row, position ids that restart with each sequence, and this object. Its attention keeps the
    sequences apart (see `trainer.models.attention`).

    A sequence may share its first tokens, its prefix, with its leader: the last sequence before it without a prefix.
    The row contains the tokens of the prefix only once, in the leader. The model's results for them are the same for
    both sequences, because no token attends to later tokens.

    Args:
        lengths: number of tokens of each sequence, at least 1.
        cp: the ranks among which the row is split into slices of equal size. None: this rank has all tokens.
        prefix_lengths: number of tokens that each sequence shares with its leader, less than its length. 0 for leaders.
            None: no sequence has a prefix.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        device: str | torch.device,
        cp: AxisGroup | None = None,
        prefix_lengths: Sequence[int] | None = None,
    ):
        self.lengths = tuple(int(length) for length in lengths)
        self.prefix_lengths = (0,) * len(self.lengths) if prefix_lengths is None else tuple(map(int, prefix_lengths))
        self.device = device
        self.kernels = torch.device(device).type  # whose attention computes the row; plans set that of another machine
        self.cp = cp
        self.longest = max(self.lengths)
        self.has_prefixes = prefix_lengths is not None  # even if all are 0, so that compiled blocks have only one graph
        self.suffix_lengths = tuple(n - prefix for n, prefix in zip(self.lengths, self.prefix_lengths, strict=True))
        """Number of tokens of each sequence after its prefix: those that the row contains for it."""
        assert min(self.suffix_lengths) > 0, "a sequence needs a token after its prefix"
        self.longest_suffix = max(self.suffix_lengths)
        self.tokens = sum(self.suffix_lengths)

    @property
    def local_slice(self) -> slice:
        """The slice of the row that this rank has. The slices of the last ranks may reach beyond the row."""
        if self.cp is None:
            return slice(0, self.tokens)
        size = -(-self.tokens // self.cp.size)
        return slice(self.cp.rank * size, (self.cp.rank + 1) * size)

    def shard(self, row: Tensor) -> Tensor:
        """Return this rank's slice `(1, n)` of a row `(1, N)`, padded with zeros beyond the row."""
        if self.cp is None:
            return row
        local = self.local_slice
        return F.pad(row, (0, max(0, local.stop - self.tokens)))[:, local]

    def gather(self, local: Tensor) -> Tensor:
        """Return the row `(1, N)` of which each rank has a slice `(1, n)`. All ranks must compute the same with it."""
        if self.cp is None:
            return local
        after = self.cp.size * local.shape[1] - self.local_slice.stop
        return self.cp.all_reduce(F.pad(local, (self.local_slice.start, after)))[:, : self.tokens]

    @cached_property
    def position_ids(self) -> Tensor:
        """`(1, N)`: the position of each token in its sequence, from 0."""
        starts = np.repeat(self._starts - self.prefix_lengths, self.suffix_lengths)
        return self._tensor((np.arange(self.tokens) - starts)[None])

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """`(B + 1,)` int32: the index in the row of the first token of each sequence's suffix, and N."""
        return self._tensor(np.append(self._starts, self.tokens).astype(np.int32))

    @cached_property
    def cu_seqlens_k(self) -> Tensor:
        """`(B + 1,)` int32: the same in a row of complete sequences, in which prefixes are repeated."""
        return self._tensor(np.append(0, np.cumsum(self.lengths)).astype(np.int32))

    @cached_property
    def key_indices(self) -> Tensor:
        """`(sum of lengths,)`: the index in the row of each token of one complete sequence after another."""
        return self._tensor(self._token_indices[np.arange(self.longest) < np.asarray(self.lengths)[:, None]])

    @cached_property
    def sizes(self) -> Tensor:
        """`(2, B)` in host memory: the lengths of the sequences, and the lengths of their prefixes."""
        return torch.tensor((self.lengths, self.prefix_lengths))

    def prepare(self) -> None:
        """Compute the tensors that compiled blocks read, because a compiled graph cannot compute them."""
        _ = self.cu_seqlens, self.sizes
        if self.has_prefixes:
            _ = self.cu_seqlens_k, self.key_indices

    @cached_property
    def buckets(self) -> list[Bucket]:
        """Buckets of sequences of similar length. Attention pads only within a bucket, so its cost is close to the sum
        of the squared lengths."""
        buckets: list[Bucket] = []
        group, common = [self.suffix_lengths[0]], (0, 0)
        low = high = self.suffix_lengths[0]
        leader = 0
        for index, (length, prefix) in enumerate(
            zip(self.suffix_lengths[1:], self.prefix_lengths[1:], strict=True), start=1
        ):
            leader = leader if prefix else index
            source = (leader, prefix) if prefix else (0, 0)
            low, high = min(low, length), max(high, length)
            if source != common or (high > _SHORT and low < _SIMILAR * high):
                buckets.append(Bucket(group, common[1]))
                group, common, low, high = [], source, length, length
            group.append(length)
        return [*buckets, Bucket(group, common[1])]

    @cached_property
    def bucket_indices(self) -> list[tuple[Tensor, Tensor]]:
        """For each bucket, the indices of its tokens in its flattened padded rows: without and with prefixes."""

        def padded(bucket: Bucket, prefix: int) -> Tensor:
            lengths = np.asarray(bucket.lengths)[:, None] + prefix
            return self._tensor(np.flatnonzero(np.arange(bucket.longest + prefix) < lengths))

        return [(padded(bucket, 0), padded(bucket, bucket.prefix_length)) for bucket in self.buckets]

    def rows_of(self, values: Tensor, indices: Tensor) -> Tensor:
        """Return the values `(1, N)` at these indices in the row, `token_indices` or `previous_indices`, as rows
        `(B, longest)`. They are 0 in the padding, and where no token is previous."""
        return index_select(F.pad(values[0], (0, 1)), indices.flatten()).view(indices.shape)

    @cached_property
    def token_indices(self) -> Tensor:
        """`(B, longest)`: the index in the row of each token; N in the padding."""
        return self._tensor(self._token_indices)

    @cached_property
    def previous_indices(self) -> Tensor:
        """`(B, longest)`: the index in the row of the token before each token; N if there is none."""
        inside = np.arange(self.longest - 1) < np.asarray(self.lengths)[:, None] - 1
        previous = np.where(inside, self._token_indices[:, :-1], self.tokens)
        return self._tensor(np.pad(previous, ((0, 0), (1, 0)), constant_values=self.tokens))

    @cached_property
    def has_previous(self) -> Tensor:
        """`(B, longest)` bool: 1 for tokens that are not the first of their sequence; 0 in the padding."""
        return self.previous_indices < self.tokens

    @cached_property
    def _starts(self) -> np.ndarray:
        """`(B,)`: the index in the row of the first token of each sequence's suffix."""
        return np.cumsum((0, *self.suffix_lengths[:-1]))

    @cached_property
    def _token_indices(self) -> np.ndarray:
        columns, prefix = np.arange(self.longest), np.asarray(self.prefix_lengths)[:, None]
        leaders = self._starts[np.maximum.accumulate(np.where(prefix[:, 0] == 0, np.arange(len(prefix)), 0))]
        suffix = (self._starts[:, None] - prefix) + columns
        indices = np.where(columns < prefix, leaders[:, None] + columns, suffix)
        return np.where(columns < np.asarray(self.lengths)[:, None], indices, self.tokens)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)
