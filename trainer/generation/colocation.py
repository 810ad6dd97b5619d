"""Which GPUs of ranks each engine shares."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trainer.errors import RESTART_HINT, WorkerError

Place = Mapping[str, Any]
"""Host, node id and GPU ids of a process (see `trainer.cluster.worker_groups.WorkerGroup.where`)."""
GpuAssignment = Sequence[Place]
"""The ranks whose GPUs an engine shares."""


def assign_gpus(ranks: Sequence[Place], homes: Sequence[GpuAssignment | None], size: int) -> list[GpuAssignment | None]:
    """Return the home of each engine, on one node; None: no GPUs are left for it.

    An engine keeps its GPUs as long as ranks have them. The others get what is left, in their order.

    Args:
        ranks: where the ranks are; those of one node follow one another.
        homes: the homes so far; None: the engine has none.
        size: number of GPUs of an engine.
    """
    owners = {gpu: place for place in ranks for gpu in gpus_of([place])}
    chosen: list[GpuAssignment | None] = []
    for home in homes:
        gpus = gpus_of(home or [])
        chosen.append([owners.pop(gpu) for gpu in sorted(gpus)] if gpus and gpus <= owners.keys() else None)
    for engine in [engine for engine, home in enumerate(chosen) if home is None]:
        for node in dict.fromkeys(node for node, _ in owners):
            gpus = [gpu for gpu in owners if gpu[0] == node][:size]
            if len(gpus) == size:
                chosen[engine] = [owners.pop(gpu) for gpu in gpus]
                break
    return chosen


def colocated_ranks(homes: Iterable[GpuAssignment], ranks: Sequence[Place]) -> tuple[int, ...]:
    """Return the ranks that share a GPU with an engine in one of `homes`.

    Raises:
        WorkerError: an engine has a GPU that no rank has.
    """
    wanted: set[tuple[str, str]] = set().union(*map(gpus_of, homes))
    if left := wanted - gpus_of(ranks):
        node, gpu = sorted(left)[0]
        raise WorkerError(f"an engine is on GPU {gpu} of node {node}, where no rank can give it weights", RESTART_HINT)
    return tuple(rank for rank, place in enumerate(ranks) if gpus_of([place]) & wanted)


def gpus_of(places: Iterable[Place]) -> set[tuple[str, str]]:
    """Return the node id and the id on the node of each GPU."""
    return {(place["node"], gpu) for place in places for gpu in place["gpus"]}
