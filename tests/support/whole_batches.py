"""What the driver asks of ranks, without a driver: each rank has the whole batch. All are collectives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from trainer.objectives.base import GROUP
from trainer.parallel.batching import Batch, RankUpdate, select
from trainer.parallel.load_balancing import Share, divide
from trainer.workers.rank import Rank


def compute_batch(rank: Rank, role: str, output: str, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers `(n,)` of this rank's rows of a batch, and their `output` `(n, T)`."""
    rows, values = rank.call(role, output, share_of(rank, role, batch, [np.arange(len(batch["lengths"]))]))
    return rows, np.pad(values, ((0, 0), (0, batch["input_ids"].shape[1] - values.shape[1])))


def update_batch(
    rank: Rank, role: str, batch: Batch, step: int, numbers: Mapping[str, float] | None = None
) -> RankUpdate:
    """Make all optimizer steps of a role in one step."""
    objective = rank.objective
    mini_batches = objective.mini_batches(batch, step)
    share = share_of(rank, role, batch, mini_batches, keeps_groups=objective.unit == GROUP)
    totals = [objective.totals(role, select(batch, rows)) for rows in mini_batches]
    return rank.call(role, "update", share, step, totals, objective.numbers() if numbers is None else numbers)


def share_of(
    rank: Rank, role: str, batch: Batch, mini_batches: Sequence[np.ndarray], keeps_groups: bool = False
) -> Share:
    index, limits = rank.roles[role].limits()
    return divide(batch, mini_batches, limits, rank.layout.dp_size, keeps_groups)[index]
