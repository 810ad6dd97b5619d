"""What FSDP does during a pass, by the events of torch's profiler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile

Prefetches = dict[str, list[str]]
"""The units that FSDP begins to gather before each unit runs; the units are in the order in which they run."""


def prefetches(function: Callable[[], Any]) -> tuple[Prefetches, Prefetches]:
    """The prefetches of the forward pass and of the backward pass of one micro-batch. The whole model's name is ''."""
    names = _events(function)
    return _of_pass("forward", names), _of_pass("backward", names)


def gathers(function: Callable[[], Any]) -> Counter[str]:
    """How many times FSDP gathers each unit."""
    copied = "all_gather_copy_out"
    return Counter(name.removeprefix(copied).strip(" ()") for name in _events(function) if name.startswith(copied))


def _events(function: Callable[[], Any]) -> list[str]:
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        function()
    events = sorted(recorded.events() or (), key=lambda event: event.time_range.start)
    return [event.name.removeprefix("FSDP::") for event in events if event.name.startswith("FSDP::")]


def _of_pass(direction: str, names: list[str]) -> Prefetches:
    found: Prefetches = {}
    for name in names:
        kind, _, unit = name.partition(" ")
        if kind == f"pre_{direction}":
            assert unit not in found, "more than one micro-batch"
            current = found[unit.strip("()")] = []
        elif kind == f"{direction}_prefetch" and unit.removeprefix("for ") not in current:
            current.append(unit.removeprefix("for "))
    return found


def in_order(units: list[str], depth: int) -> Prefetches:
    """The prefetches of a pass in which each unit gathers the next `depth` ones."""
    return {unit: units[i + 1 : i + 1 + depth] for i, unit in enumerate(units)}
