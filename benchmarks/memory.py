"""The most memory that a function takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def peak_bytes(function: Callable[[], Any], device: str) -> int:
    """Return how far the memory of this process grows while `function` runs: of tensors on CUDA, of all on CPU."""
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        function()
        return torch.cuda.max_memory_allocated() - before
    reset_peak()
    before = resident_bytes()
    function()
    return peak_resident_bytes() - before


def allocator_peak(function: Callable[[], Any]) -> int:
    """Return the most host memory that tensors of `function` take at one time, by the events of torch's allocator."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        function()
    events = recorded.profiler.kineto_results.events()  # type: ignore[union-attr]
    taken = peak = 0
    for event in sorted((event for event in events if event.name() == "[memory]"), key=lambda event: event.start_ns()):
        taken += event.nbytes()
        peak = max(peak, taken)
    return peak


def reset_peak(process: str = "self") -> None:
    """Let `peak_resident_bytes` measure from now on."""
    with open(f"/proc/{process}/clear_refs", "w") as file:
        file.write("5")


def resident_bytes() -> int:
    """Return the memory that this process has."""
    return _status("VmRSS")


def peak_resident_bytes(process: str = "self") -> int:
    """Return the most memory that a process has had since `reset_peak`."""
    return _status("VmHWM", process)


def _status(name: str, process: str = "self") -> int:
    with open(f"/proc/{process}/status") as file:
        line = next(line for line in file if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024
