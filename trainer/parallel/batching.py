"""The split of a batch over ranks and micro-batches.

Every rank knows the lengths of the whole batch and computes the same plan, so the ranks need not communicate. Losses
are normalised over the global batch, so the plan changes the speed and never the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from trainer.parallel.packing import Packing

Batch = dict[str, np.ndarray]
"""Arrays that share their first axis (sequences); `(B, T)` per token, `(B,)` per sequence. Sequences are
padded on the right while they travel; `lengths (B,)` counts their tokens without padding."""


def plan_micro_batches(lengths: Sequence[int], num_ranks: int, max_tokens: int) -> list[list[list[int]]]:
    """Return the rows of each rank's micro-batches: `plan[rank][i]`.

    Rows of similar length go together, and each micro-batch holds at most `max_tokens` tokens (a longer row goes
    alone). Every rank gets the same number of micro-batches, because each one is a collective. A rank with an empty
    micro-batch takes part in the collective and contributes nothing.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    groups: list[list[int]] = []
    used = 0
    for row in order:
        used += lengths[row]
        if groups and used <= max_tokens:
            groups[-1].append(row)
        else:
            groups.append([row])
            used = lengths[row]
    while len(groups) % num_ranks:
        widest = max(range(len(groups)), key=lambda i: (len(groups[i]) > 1, _cost(groups[i], lengths), -i))
        group = groups[widest]
        # Take every other row, so that both halves cost about the same.
        groups[widest : widest + 1] = [group[::2], group[1::2]] if len(group) > 1 else [group, []]
    # Assign the most expensive micro-batch first, each to the rank with the least work that still has room.
    plan: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    load = [0] * num_ranks
    for group in sorted(groups, key=lambda g: -_cost(g, lengths)):
        rank = min((r for r in range(num_ranks) if len(plan[r]) < len(groups) // num_ranks), key=lambda r: (load[r], r))
        plan[rank].append(group)
        load[rank] += _cost(group, lengths)
    return plan


def _cost(rows: Sequence[int], lengths: Sequence[int]) -> int:
    return sum(lengths[row] for row in rows)


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


def take_rows(batch: Batch, rows: Sequence[int], device: str) -> MicroBatch:
    """Return the micro-batch of these rows on `device`.

    If `rows` is empty, take one row of the batch and set its float arrays, masks included, to zero.
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
    return MicroBatch(list(rows), torch.from_numpy(tokens[None]).to(device), Packing(lengths, device), tensors)


def select(batch: Batch, rows: Sequence[int] | np.ndarray) -> Batch:
    """Return the sub-batch of these rows."""
    return {name: array[rows] for name, array in batch.items()}


def stack_padded(rows: Sequence[Sequence[float]], dtype: type, length: int) -> np.ndarray:
    """Return rows of different lengths as one `(B, length)` array, padded with zeros on the right."""
    out = np.zeros((len(rows), length), dtype=dtype)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out
