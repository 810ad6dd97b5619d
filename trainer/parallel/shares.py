"""What each rank gets of a batch: the rows that it computes, and their micro-batches.

One process plans for all ranks, the driver, and sends each its share. So what a rank receives does not grow with the
number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainer.parallel.batching import Batch, count_shared_tokens, select
from trainer.parallel.load_balancing import Plan, Rows, plan_micro_batches


@dataclass(frozen=True)
class Limits:
    """What decides the micro-batches of a model."""

    max_tokens: int
    """The most tokens of a micro-batch. 1: one sequence."""
    quadratic: float
    """See `Rows`."""
    shares_prompts: bool
    """Rows of a group compute the tokens with which they all begin only once."""


@dataclass(frozen=True)
class Part:
    """What a rank computes of one mini-batch, or of a batch that is scored."""

    micro_batches: list[list[int]]
    """Rows of the share's arrays. All ranks have as many; an empty one contributes nothing."""
    shared: np.ndarray | None
    """`(n,)`: see `count_shared_tokens`. None: no rows share tokens."""
    tokens: float
    """Number of tokens to train on, of all ranks."""
    has_old_logprobs: bool
    """All rows of the mini-batch have old log-probs."""


@dataclass(frozen=True)
class Share:
    """What one data-parallel rank gets of a batch."""

    batch: Batch
    """The arrays of its rows, at least of one; `(n, T)` with T the longest of them."""
    rows: np.ndarray
    """`(n,)`: their numbers in the whole batch."""
    parts: list[Part]
    """One for each mini-batch of a step, in order; a batch that is scored is one part."""


def has_old_logprobs(batch: Batch) -> np.ndarray:
    """Return which rows `(B,)` have old log-probs."""
    return batch.get("has_old_logprobs", np.full(len(batch["mask"]), "old_logprobs" in batch))


@dataclass(frozen=True)
class _Planned:
    """A mini-batch as all ranks divide it."""

    rows: np.ndarray
    plan: Plan
    """Of indices of `rows`."""
    shared: np.ndarray | None
    """`(B,)`, of the whole batch."""
    tokens: float
    has_old_logprobs: bool


def divide(
    batch: Batch, mini_batches: Sequence[np.ndarray], limits: Limits, num_ranks: int, keeps_groups: bool = False
) -> list[Share]:
    """Return the share of each data-parallel rank.

    Args:
        batch: `input_ids`, `mask`: `(B, T)`; `lengths`, `group_ids`: `(B,)`; further arrays of these shapes.
        mini_batches: the rows of each: whole groups. A batch that is scored is one.
        keeps_groups: no micro-batch has a part of a group.
    """
    known = has_old_logprobs(batch)
    planned = [_plan(batch, rows, known, limits, num_ranks, keeps_groups) for rows in mini_batches]
    return [_share(batch, planned, rank) for rank in range(num_ranks)]


def _plan(
    batch: Batch, rows: np.ndarray, known: np.ndarray, limits: Limits, num_ranks: int, keeps_groups: bool
) -> _Planned:
    own = select({name: batch[name] for name in ("input_ids", "lengths", "group_ids")}, rows)
    shared = count_shared_tokens(own) if limits.shares_prompts else None
    shared = shared if shared is not None and shared.any() else None
    costs = Rows(own["lengths"], limits.quadratic, own["group_ids"], shared, keeps_groups)
    plan = plan_micro_batches(costs, num_ranks, limits.max_tokens)
    of_batch = None
    if shared is not None:
        of_batch = np.zeros(len(known), np.int64)
        of_batch[rows] = shared
    return _Planned(rows, plan, of_batch, float(batch["mask"][rows].sum()), bool(known[rows].all()))


def _share(batch: Batch, planned: Sequence[_Planned], rank: int) -> Share:
    chosen = [[part.rows[micro_batch] for micro_batch in part.plan[rank]] for part in planned]
    numbers = np.unique(np.concatenate([rows for micro_batches in chosen for rows in micro_batches]))
    if not len(numbers):
        numbers = np.zeros(1, np.int64)  # a rank without rows computes one, whose masks are 0
    longest = int(batch["lengths"][numbers].max())
    arrays = {name: array[numbers, :longest] if array.ndim == 2 else array[numbers] for name, array in batch.items()}
    parts = [
        Part(
            [np.searchsorted(numbers, rows).tolist() for rows in micro_batches],
            None if part.shared is None else part.shared[numbers],
            part.tokens,
            part.has_old_logprobs,
        )
        for part, micro_batches in zip(planned, chosen, strict=True)
    ]
    return Share(arrays, numbers, parts)
