"""The split of a batch over ranks and micro-batches.

Every rank knows the lengths of the whole batch and computes the same plan, so the ranks need not communicate. Losses
are normalised over the global batch, so the plan changes the speed and never the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from trainer.parallel.collectives import Peers
from trainer.parallel.packing import Packing

Batch = dict[str, np.ndarray]
"""Arrays that share their first axis (sequences); `(B, T)` per token, `(B,)` per sequence. Sequences are
padded on the right while they travel; `lengths (B,)` counts their tokens without padding."""


def plan_micro_batches(
    lengths: Sequence[int], num_ranks: int, max_tokens: int, quadratic: float = 0.0
) -> list[list[list[int]]]:
    """Return the rows of each rank's micro-batches: `plan[rank][i]`.

    Each micro-batch holds at most `max_tokens` tokens (a longer row goes alone). Every rank gets the same number of
    micro-batches, because each one is a collective. The ranks wait for the slowest at each of them, so the i-th
    micro-batches of all ranks cost about the same. A rank with an empty micro-batch takes part in the collective and
    contributes nothing.

    Args:
        quadratic: a row of L tokens costs `L + quadratic L^2`.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    costs = sizes + quadratic * sizes.astype(np.float64) ** 2
    order = np.lexsort((np.arange(len(sizes)), -sizes))
    count = max(1, -(-int(np.minimum(sizes, max_tokens).sum()) // (num_ranks * max_tokens)))
    while (groups := _fill(order, sizes, costs, num_ranks * count, max_tokens)) is None:
        count += 1
    groups.sort(key=lambda group: -costs[group].sum())
    return [groups[rank::num_ranks] for rank in range(num_ranks)]


def _fill(order: np.ndarray, sizes: np.ndarray, costs: np.ndarray, count: int, limit: int) -> list[list[int]] | None:
    """Share out rows to `count` groups of similar cost, the longest first; None if they do not fit.

    Each row goes to the group that costs the least so far, of those that have room for it.
    """
    groups: list[list[int]] = [[] for _ in range(count)]
    tokens, load = np.zeros(count, np.int64), np.zeros(count)
    for row in order.tolist():
        has_room = (tokens == 0) | (tokens + sizes[row] <= limit)
        if not has_room.any():
            return None
        group = int(np.argmin(np.where(has_room, load, np.inf)))
        groups[group].append(row)
        tokens[group] += sizes[row]
        load[group] += costs[row]
    return groups


@dataclass(frozen=True)
class MicroBatch:
    """Rows of a batch on a device, packed for the model and padded for the loss."""

    rows: list[int]
    """The rows of the batch; empty: the micro-batch contributes nothing."""
    input_ids: torch.Tensor
    """`(1, N)`: the rows' tokens, one row after another."""
    packing: Packing
    """The boundaries of the rows in `input_ids`."""
    arrays: dict[str, torch.Tensor]
    """The other arrays: `(b, t)` with t the longest row, or `(b,)`."""

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.arrays[name]

    def __contains__(self, name: str) -> bool:
        return name in self.arrays


def take_rows(batch: Batch, rows: Sequence[int], device: str, context: Peers | None = None) -> MicroBatch:
    """Return the micro-batch of these rows on `device`.

    If `rows` is empty, take one row of the batch and set its float arrays, masks included, to zero.

    Args:
        context: the ranks that share the tokens of the micro-batch (see `Packing`).
    """
    picked = np.asarray(rows if len(rows) else [0])
    lengths = batch["lengths"][picked]
    longest = int(lengths.max())
    arrays = {}
    for name, array in batch.items():
        part = array[picked, :longest] if array.ndim == 2 else array[picked]
        arrays[name] = np.zeros_like(part) if not len(rows) and part.dtype.kind == "f" else part
    tokens = arrays.pop("input_ids")[np.arange(longest) < lengths[:, None]]
    tensors = {name: torch.from_numpy(np.ascontiguousarray(array)).to(device) for name, array in arrays.items()}
    input_ids = torch.from_numpy(tokens[None].astype(np.int64)).to(device)  # int32 on the way, to halve the traffic
    return MicroBatch(list(rows), input_ids, Packing(lengths, device, context), tensors)


def select(batch: Batch, rows: Sequence[int] | np.ndarray) -> Batch:
    """Return the sub-batch of these rows."""
    return {name: array[rows] for name, array in batch.items()}


def stack_padded(rows: Sequence[Sequence[float]], dtype: type, length: int) -> np.ndarray:
    """Return rows of different lengths as one `(B, length)` array, padded with zeros on the right."""
    out = np.zeros((len(rows), length), dtype=dtype)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out
