"""Which GPUs of ranks each engine shares."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trainer.errors import RESTART_HINT, WorkerError

Placement = Mapping[str, Any]
"""Host, node id and GPU ids of a process (see `trainer.cluster.worker_groups.WorkerGroup.placements`)."""
GpuAssignment = Sequence[Placement]
"""The ranks whose GPUs an engine shares."""


def assign_gpus(
    ranks: Sequence[Placement], assignments: Sequence[GpuAssignment | None], size: int
) -> list[GpuAssignment | None]:
    """Return the GPUs of each engine, on one node; None: no GPUs are left for it.

    An engine keeps its GPUs as long as ranks have them. The others get what is left, in their order.

    Args:
        ranks: the placements of the ranks; those of one node follow one another.
        assignments: the current ones; None: the engine has no GPUs.
        size: number of GPUs of an engine.
    """
    owners = {gpu: placement for placement in ranks for gpu in gpus_of([placement])}
    assigned: list[GpuAssignment | None] = []
    for assignment in assignments:
        gpus = gpus_of(assignment or [])
        assigned.append([owners.pop(gpu) for gpu in sorted(gpus)] if gpus and gpus <= owners.keys() else None)
    for engine in [engine for engine, assignment in enumerate(assigned) if assignment is None]:
        for node in dict.fromkeys(node for node, _ in owners):
            gpus = [gpu for gpu in owners if gpu[0] == node][:size]
            if len(gpus) == size:
                assigned[engine] = [owners.pop(gpu) for gpu in gpus]
                break
    return assigned


def colocated_ranks(assignments: Iterable[GpuAssignment], ranks: Sequence[Placement]) -> tuple[int, ...]:
    """Return the ranks that share a GPU with an engine that has one of `assignments`.

    Raises:
        WorkerError: an engine has a GPU that no rank has.
    """
    of_engines: set[tuple[str, str]] = set().union(*map(gpus_of, assignments))
    if left := of_engines - gpus_of(ranks):
        node, gpu = sorted(left)[0]
        raise WorkerError(f"an engine is on GPU {gpu} of node {node}, where no rank can give it weights", RESTART_HINT)
    return tuple(rank for rank, placement in enumerate(ranks) if gpus_of([placement]) & of_engines)


def gpus_of(placements: Iterable[Placement]) -> set[tuple[str, str]]:
    """Return the node id and the id on the node of each GPU."""
    return {(placement["node"], gpu) for placement in placements for gpu in placement["gpus"]}
