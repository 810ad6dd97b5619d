"""The split of a batch over ranks and micro-batches.

Every rank sees the whole batch's lengths and computes the same plan, so nothing is communicated, and
losses are normalised over the global batch, so the plan changes speed and never the result.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

Batch = dict[str, np.ndarray]
"""Arrays that share their first axis (sequences); `(B, T)` per token, `(B,)` per sequence. Sequences are
padded on the right; `lengths (B,)` counts their tokens without padding."""


def plan_micro_batches(lengths: Sequence[int], num_ranks: int, max_tokens: int) -> list[list[list[int]]]:
    """Row indices for each rank's micro-batches: `plan[rank][i]`.

    Rows of similar length go together, each micro-batch holds at most `max_tokens` tokens with padding (a
    longer row goes alone), and every rank gets the same number of micro-batches, because each one is a
    collective. An empty micro-batch means: take part, contribute nothing.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    groups: list[list[int]] = []
    for row in order:
        if groups and lengths[groups[-1][0]] * (len(groups[-1]) + 1) <= max_tokens:
            groups[-1].append(row)
        else:
            groups.append([row])
    while len(groups) % num_ranks:
        widest = max(range(len(groups)), key=lambda i: (len(groups[i]) > 1, _cost(groups[i], lengths), -i))
        group = groups[widest]
        if len(group) > 1:
            groups[widest : widest + 1] = [group[: len(group) // 2], group[len(group) // 2 :]]
        else:
            groups.append([])
    # Most expensive first, each to the rank that has done least and still has room.
    plan: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    load = [0] * num_ranks
    for group in sorted(groups, key=lambda g: -_cost(g, lengths)):
        rank = min((r for r in range(num_ranks) if len(plan[r]) < len(groups) // num_ranks), key=lambda r: (load[r], r))
        plan[rank].append(group)
        load[rank] += _cost(group, lengths)
    return plan


def _cost(rows: Sequence[int], lengths: Sequence[int]) -> int:
    return max((lengths[row] for row in rows), default=0) * len(rows)


def take_rows(batch: Batch, rows: Sequence[int], device: str) -> dict[str, torch.Tensor]:
    """The micro-batch of these rows on `device`, cut to its longest row.

    No rows: one row of the batch whose float arrays, masks among them, are zero.
    """
    picked = np.asarray(rows if len(rows) else [0])
    longest = int(batch["lengths"][picked].max())
    tensors = {}
    for name, array in batch.items():
        part = array[picked, :longest] if array.ndim == 2 else array[picked]
        if not len(rows) and part.dtype.kind == "f":
            part = np.zeros_like(part)
        tensors[name] = torch.from_numpy(np.ascontiguousarray(part)).to(device)
    return tensors


def select(batch: Batch, rows: Sequence[int] | np.ndarray) -> Batch:
    """The sub-batch of these rows."""
    return {name: array[rows] for name, array in batch.items()}


def stack_padded(rows: Sequence[Sequence[float]], dtype: type, length: int, offsets: Sequence[int] | None = None):
    """Rows of different lengths as one zero-padded `(B, length)` array, row i starting at `offsets[i]`."""
    out = np.zeros((len(rows), length), dtype=dtype)
    for i, row in enumerate(rows):
        start = offsets[i] if offsets is not None else 0
        out[i, start : start + len(row)] = row
    return out
