"""What each rank gets of a batch: the rows that it computes, and their micro-batches.

One process plans for all ranks, the driver, and sends each its share. So what a rank receives does not grow with the
number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from trainer.parallel.batching import Batch, count_shared_tokens, select

_MOST_KEYS = 4
"""Attention copies the keys of shared tokens for each row that has them: at most this many keys for each token of a
micro-batch."""

_MICRO_BATCH = 256
"""What one more micro-batch costs, with the collectives around each block, in units of a token without attention."""

Plan = list[list[list[int]]]  # the rows of each rank's micro-batches: `plan[rank][i]`


@dataclass(frozen=True)
class Rows:
    """The rows of a batch, and what they cost. Rows of one group that are in the same micro-batch compute the tokens
    that they share only once."""

    lengths: np.ndarray  # `(B,)`: tokens of each row
    quadratic: float = 0.0  # a row of L tokens costs `L + quadratic L^2`
    groups: np.ndarray | None = None  # `(B,)`: which rows share tokens. None: none do.
    shared: np.ndarray | None = None  # `(B,)`: with how many tokens all rows of the row's group begin
    keeps_groups: bool = False  # no group is divided, however long its rows are

    def prefix_groups(self) -> list[np.ndarray]:
        """Return the rows that share tokens, the longest first, and each other row by itself. If groups are kept,
        return the rows of each group."""
        longest_first = np.argsort(-self.lengths, kind="stable")
        if self.keeps_groups:
            assert self.groups is not None
            order = longest_first[np.argsort(self.groups[longest_first], kind="stable")]
            return np.split(order, np.flatnonzero(np.diff(self.groups[order])) + 1)
        if self.groups is None or self.shared is None:
            return list(longest_first[:, None])
        alone = longest_first[self.shared[longest_first] == 0]
        rest = longest_first[self.shared[longest_first] > 0]
        order = rest[np.argsort(self.groups[rest], kind="stable")]
        starts = np.flatnonzero(np.diff(self.groups[order])) + 1
        return [*alone[:, None], *(np.split(order, starts) if len(order) else [])]

    def num_tokens_of(self, pieces: Sequence[np.ndarray]) -> np.ndarray:
        """Return how many tokens each of these pieces of groups counts as, of the limit of a micro-batch."""
        rows = np.concatenate(pieces)
        starts = np.cumsum([0, *map(len, pieces[:-1])])
        keys = np.add.reduceat(self.lengths[rows], starts)
        tokens = keys
        if self.groups is not None and self.shared is not None:
            tokens = keys - (np.add.reduceat(self.shared[rows], starts) - self.shared[rows[starts]])
        return np.maximum(tokens, -(-keys // _MOST_KEYS))

    def neighbours(self, rows: Sequence[int]) -> list[int]:
        """Return the rows in an order in which those that share tokens follow one another."""
        if self.groups is None or self.shared is None:
            return list(rows)
        keys = [int(self.groups[row]) if self.shared[row] else -1 - row for row in rows]
        first = {key: index for index, key in reversed(list(enumerate(keys)))}
        return [row for _, row in sorted(zip(keys, rows, strict=True), key=lambda pair: first[pair[0]])]

    def cost(self, rows: Sequence[int] | np.ndarray) -> float:
        """Return the cost of a micro-batch, in units of a token without attention."""
        rows = np.asarray(rows, dtype=np.int64)
        own, shared = self._costs
        whole = float(own[rows].sum())
        if len(rows) < 2 or self.groups is None or shared is None:
            return whole
        groups = self.groups[rows]
        if (groups == groups[0]).all():
            return whole - float(shared[rows[1:]].sum())
        _, first = np.unique(groups, return_index=True)
        repeated = np.ones(len(rows), bool)
        repeated[first] = False
        return whole - float(shared[rows[repeated]].sum())

    @cached_property
    def _costs(self) -> tuple[np.ndarray, np.ndarray | None]:
        """What the tokens of each row cost, and those that it shares."""

        def cost(counts: np.ndarray) -> np.ndarray:
            tokens = counts.astype(np.float64)
            return tokens + self.quadratic * tokens**2

        return cost(self.lengths), None if self.shared is None else cost(self.shared)


def plan_micro_batches(rows: Rows, num_ranks: int, max_tokens: int) -> Plan:
    """Return the rows of each rank's micro-batches.

    Each micro-batch holds at most `max_tokens` tokens (a longer row, or a longer group that is kept together, goes
    alone). Every rank gets the same number of micro-batches, because each one is a collective. The ranks wait for the
    slowest at each of them, so the i-th micro-batches of all ranks cost about the same. A rank with an empty
    micro-batch takes part in the collective and contributes nothing.

    Rows that share tokens stay together, or are divided into as many slices as make the plan fastest: more slices can
    be balanced better, and repeat more tokens. With `Rows.keeps_groups` no group is divided.
    """
    groups = rows.prefix_groups()
    plans, slices = [_plan(rows, groups, num_ranks, max_tokens)], 1
    while not rows.keeps_groups and slices < max(map(len, groups)):
        slices *= 2
        divided = [piece for group in groups for piece in _divide(group, slices)]
        plans.append(_plan(rows, divided, num_ranks, max_tokens))
    return min(plans, key=lambda plan: plan_time(rows, plan))


def _divide(group: np.ndarray, slices: int) -> list[np.ndarray]:
    count = min(slices, len(group))
    return [group[i::count] for i in range(count)]


def _plan(rows: Rows, groups: list[np.ndarray], num_ranks: int, max_tokens: int) -> Plan:
    """Return a plan that keeps each group together, unless it is too large for a micro-batch and may be divided."""
    pieces: list[np.ndarray] = []
    for group, tokens in zip(groups, rows.num_tokens_of(groups).tolist(), strict=True):
        if rows.keeps_groups or tokens <= max_tokens:
            pieces.append(group)
            continue
        slices = -(-tokens // max_tokens)
        while slices < len(group) and rows.num_tokens_of(_divide(group, slices)).max() > max_tokens:
            slices += 1
        pieces += _divide(group, slices)
    sizes = rows.num_tokens_of(pieces)
    costs = np.asarray([rows.cost(piece) for piece in pieces])
    order = np.lexsort(([piece[0] for piece in pieces], -sizes))
    least = max(-(-int(np.minimum(sizes, max_tokens).sum()) // max_tokens), int((sizes > max_tokens / 2).sum()))
    count = max(1, -(-least // num_ranks))
    while (filled := _fill(order, sizes, costs, num_ranks * count, max_tokens)) is None:
        count += 1
    filled.sort(key=lambda chosen: -costs[chosen].sum())
    batches = [rows.neighbours([int(row) for piece in chosen for row in pieces[piece]]) for chosen in filled]
    return [batches[rank::num_ranks] for rank in range(num_ranks)]


def plan_time(rows: Rows, plan: Plan) -> float:
    """Return the cost of a plan, whose ranks wait for the slowest at each micro-batch."""
    return sum(_MICRO_BATCH + max(rows.cost(batch) for batch in batches) for batches in zip(*plan, strict=True))


def _fill(order: np.ndarray, sizes: np.ndarray, costs: np.ndarray, count: int, limit: int) -> list[list[int]] | None:
    """Distribute pieces over `count` micro-batches of similar cost, the longest first; None if they do not fit. Each
    piece goes to the micro-batch that costs the least so far, among those that have the capacity."""
    batches: list[list[int]] = [[] for _ in range(count)]
    tokens, load = np.zeros(count, np.int64), np.zeros(count)
    for piece in order.tolist():
        fits = (tokens == 0) | (tokens + sizes[piece] <= limit)
        if not fits.any():
            return None
        batch = int(np.argmin(np.where(fits, load, np.inf)))
        batches[batch].append(piece)
        tokens[batch] += sizes[piece]
        load[batch] += costs[piece]
    return batches


@dataclass(frozen=True)
class Limits:
    max_tokens: int  # the most tokens of a micro-batch. 1: one sequence.
    quadratic: float  # see `Rows`
    shares_prompts: bool  # rows of a group compute the tokens with which they all begin only once


@dataclass(frozen=True)
class MiniBatch:
    """What a rank computes of one mini-batch, or of a whole batch before the update."""

    micro_batches: list[list[int]]
    """Rows of the share's arrays. All ranks have as many; an empty one contributes nothing."""
    shared: np.ndarray | None  # `(n,)`: see `count_shared_tokens`. None: no rows share tokens.
    tokens: float  # number of tokens to train on, of all ranks
    has_old_logprobs: bool  # all rows of the mini-batch have old log-probs


@dataclass(frozen=True)
class Share:
    batch: Batch  # the arrays of its rows, at least of one; `(n, T)` with T the longest of them
    rows: np.ndarray  # `(n,)`: their numbers in the whole batch
    mini_batches: list[MiniBatch]
    """One for each mini-batch of a step, in order; a batch that is computed before the update is one."""


def has_old_logprobs(batch: Batch) -> np.ndarray:
    return batch.get("has_old_logprobs", np.full(len(batch["mask"]), "old_logprobs" in batch))


def divide(
    batch: Batch, mini_batches: Sequence[np.ndarray], limits: Limits, num_ranks: int, keeps_groups: bool = False
) -> list[Share]:
    """Return the share of each data-parallel rank.

    Args:
        batch: `input_ids`, `mask`: `(B, T)`; `lengths`, `group_ids`: `(B,)`; further arrays of these shapes.
        mini_batches: the rows of each: whole groups. A batch that is computed before the update is one.
        keeps_groups: no micro-batch has a part of a group.
    """
    known = has_old_logprobs(batch)
    rows_of: list[list[list[np.ndarray]]] = [[] for _ in range(num_ranks)]  # of the micro-batches of each rank
    of_all_ranks = []
    for rows in mini_batches:
        own = select({name: batch[name] for name in ("input_ids", "lengths", "group_ids")}, rows)
        shared, of_batch = count_shared_tokens(own) if limits.shares_prompts else None, None
        if shared is not None and shared.any():
            of_batch = np.zeros(len(known), np.int64)
            of_batch[rows] = shared
        else:
            shared = None
        costs = Rows(own["lengths"], limits.quadratic, own["group_ids"], shared, keeps_groups)
        for rank, micro_batches in enumerate(plan_micro_batches(costs, num_ranks, limits.max_tokens)):
            rows_of[rank].append([rows[micro_batch] for micro_batch in micro_batches])
        of_all_ranks.append((of_batch, float(batch["mask"][rows].sum()), bool(known[rows].all())))
    return [_share(batch, chosen, of_all_ranks) for chosen in rows_of]


def _share(batch: Batch, chosen: list[list[np.ndarray]], of_all_ranks: Sequence[tuple[Any, float, bool]]) -> Share:
    numbers = np.unique(np.concatenate([rows for micro_batches in chosen for rows in micro_batches]))
    if not len(numbers):
        numbers = np.zeros(1, np.int64)  # a rank without rows computes one, whose masks are 0
    longest = int(batch["lengths"][numbers].max())
    arrays = {name: array[numbers, :longest] if array.ndim > 1 else array[numbers] for name, array in batch.items()}
    own_mini_batches = [
        MiniBatch(
            [np.searchsorted(numbers, rows).tolist() for rows in micro_batches],
            None if shared is None else shared[numbers],
            tokens,
            has_old,
        )
        for micro_batches, (shared, tokens, has_old) in zip(chosen, of_all_ranks, strict=True)
    ]
    return Share(arrays, numbers, own_mini_batches)
