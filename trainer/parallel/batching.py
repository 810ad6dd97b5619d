"""Batches as arrays on the host, and micro-batches as tensors on a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from trainer.config import TrainerConfig
from trainer.parallel.collectives import AxisGroup
from trainer.parallel.packing import Packing
from trainer.seeding import permutation

Batch = dict[str, np.ndarray]
"""Arrays that share their first axis (sequences); `(B, T)` or `(B, T, k)` per token, `(B,)` per sequence. Sequences are
padded on the right while they travel; `lengths (B,)` counts their tokens without padding."""


@dataclass(frozen=True)
class MicroBatch:
    """Rows of a batch on a device, packed for the model and padded for the loss."""

    rows: list[int]  # the rows of the batch; empty: the micro-batch contributes nothing
    input_ids: torch.Tensor
    """`(1, N)`: the rows' tokens, one row after another; tokens that rows share are there once."""
    packing: Packing  # the boundaries of the rows in `input_ids`
    arrays: dict[str, torch.Tensor]
    """The other arrays: `(b, t)` or `(b, t, k)` with t the longest row, or `(b,)`."""

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self.arrays:
            raise KeyError(f"the micro-batch has no {name}; it has {', '.join(sorted(self.arrays))}")
        return self.arrays[name]

    def __contains__(self, name: str) -> bool:
        return name in self.arrays


@dataclass(frozen=True)
class RankUpdate:
    """The result of the update of a role in one step, on one rank. It is here because the driver reads it, too."""

    metrics: dict[str, float]  # means over the mini-batches (see `TrainedWorker.update`)
    rows: np.ndarray
    """`(n,)`: the rows of the batch whose old log-probs this rank computed; empty if the loss needed none."""
    logprobs: np.ndarray  # `(n, T)`: the old log-probs of these rows, zero-padded
    tokens: int  # number of tokens that this rank computed; those that rows share count once in a micro-batch
    entropy: tuple[np.ndarray, np.ndarray] | None = None
    """If the rollouts of the step are kept: rows of the batch `(n,)`, and the entropy of their tokens `(n, T)`. Without
    rows, or None: it was not computed."""


def mini_batches(group_ids: np.ndarray, config: TrainerConfig, step: int) -> list[np.ndarray]:
    """Return the rows of each mini-batch of a step: whole groups of `group_ids` `(B,)`, keyed by (step, epoch)."""
    _, group = np.unique(group_ids, return_inverse=True)
    count, size = int(group.max()) + 1, config.mini_batch_size
    chosen = []
    for epoch in range(config.update_epochs):
        order = permutation(count, config.seed, "mini_batch", step, epoch)
        chosen += [order[start : start + size] for start in range(0, count, size)]
    return [np.flatnonzero(np.isin(group, groups)) for groups in chosen]


def count_shared_tokens(batch: Batch) -> np.ndarray:
    """Return with how many tokens `(B,)` all rows of each row's group begin; 0 for a row that is alone. A row has at
    least one token that it does not share."""
    shared = np.zeros(len(batch["lengths"]), np.int64)
    order = np.argsort(batch["group_ids"], kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(batch["group_ids"][order])) + 1):
        if len(rows) > 1:
            tokens = batch["input_ids"][rows, : int(batch["lengths"][rows].min()) - 1]
            same = (tokens == tokens[0]).all(axis=0)
            shared[rows] = len(same) if same.all() else int(np.argmin(same))
    return shared


def take_rows(
    batch: Batch, rows: Sequence[int], device: str, cp: AxisGroup | None = None, shared: np.ndarray | None = None
) -> MicroBatch:
    """Return the micro-batch of these rows on `device`. Of no rows: one row whose float arrays, masks included, are
    zero.

    Args:
        cp: the ranks that share the tokens of the micro-batch (see `Packing`).
        shared: `(B,)`: see `count_shared_tokens`. Rows of a group that follow one another have these tokens once.
    """
    picked = np.asarray(rows if len(rows) else [0])
    lengths = batch["lengths"][picked]
    longest = int(lengths.max())
    arrays = {}
    for name, array in batch.items():
        part = array[picked, :longest] if array.ndim > 1 else array[picked]
        arrays[name] = np.zeros_like(part) if not len(rows) and part.dtype.kind == "f" else part
    taken = None  # from the first row of the group
    if shared is not None:
        follows = np.append(False, arrays["group_ids"][1:] == arrays["group_ids"][:-1])
        taken = np.where(follows, shared[picked], 0)
    columns = np.arange(longest)
    own = columns < lengths[:, None] if taken is None else (taken[:, None] <= columns) & (columns < lengths[:, None])
    tokens = arrays.pop("input_ids")[own]
    tensors = {name: torch.from_numpy(np.ascontiguousarray(array)).to(device) for name, array in arrays.items()}
    input_ids = torch.from_numpy(tokens[None].astype(np.int64)).to(device)  # int32 on the way, to halve the traffic
    return MicroBatch(list(rows), input_ids, Packing(lengths, device, cp, taken), tensors)


def select(batch: Batch, rows: Sequence[int] | np.ndarray) -> Batch:
    return {name: array[rows] for name, array in batch.items()}


def stack_padded(rows: Sequence[Sequence[float]], dtype: type, length: int) -> np.ndarray:
    """Return rows of different lengths as one `(B, length)` array, padded with zeros on the right."""
    out = np.zeros((len(rows), length), dtype=dtype)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out
