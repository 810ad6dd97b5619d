"""The ways in which weights can reach engines: a new one is one more entry here and one class."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from trainer.import_utils import import_spec

KEY = "rollout.weight_sync"


@dataclass(frozen=True)
class Place:
    """Where ranks and engines are."""

    same_node: bool
    """All of them are on one node."""
    on_gpus: bool
    """The engines are on GPUs."""
    colocated: bool
    """`rollout.colocate`."""


@dataclass(frozen=True)
class TransportSpec:
    """One way."""

    path: str
    """Import path of its class, a `Transport` of `trainer.generation.transport`. Of a built-in way its name."""
    suits: Callable[[Place], bool] = lambda place: True
    """Whether `rollout.weight_sync=auto` takes it at a place. It takes the first that suits: of the engine's own, then
    of those in the table that the engine takes."""
    problem: Callable[[Place], str | None] = lambda place: None
    """Returns why it cannot work at a place, and what to choose instead; None: it can."""


TRANSPORTS: dict[str, TransportSpec] = {
    # Between GPUs, NCCL is much faster than host memory, but it cannot join two processes on one GPU.
    "ipc": TransportSpec(
        "ipc",
        suits=lambda place: place.on_gpus and place.colocated,
        problem=lambda place: (
            None
            if place.on_gpus and place.colocated
            else "weights go from rank to engine within one GPU, and they share none; choose auto, or "
            "rollout.colocate=true on GPUs"
        ),
    ),
    "broadcast": TransportSpec(
        "broadcast",
        suits=lambda place: not place.same_node or place.on_gpus and not place.colocated,
        problem=lambda place: (
            "NCCL cannot join a rank and an engine on one GPU; use one node, or choose rollout.colocate=false"
            if place.colocated
            else None
        ),
    ),
    "shared_memory": TransportSpec(
        "shared_memory",
        suits=lambda place: place.same_node,
        problem=lambda place: (
            None if place.same_node else "ranks and engines are on several nodes; choose auto or broadcast"
        ),
    ),
}
"""By the values of `rollout.weight_sync`."""

ADAPTER = TransportSpec("adapter")
"""The way of a policy whose adapters the engines serve (`rollout.lora_sync`)."""


def find_transport(name: str | TransportSpec) -> TransportSpec:
    """Return the transport of a name: one of `TRANSPORTS`, or the value or class of an import path.

    Raises:
        UserError: there is none.
    """
    if isinstance(name, TransportSpec):
        return name
    return TRANSPORTS[name] if name in TRANSPORTS else _import_transport(name)


@functools.cache
def _import_transport(path: str) -> TransportSpec:
    usual = "a TransportSpec (trainer.config), or a class like Transport (trainer.generation.transport)"
    return import_spec(path, KEY, TransportSpec, ("auto", *TRANSPORTS), usual)
