"""The most memory that a function takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def peak_bytes(function: Callable[[], Any], device: str) -> int:
    """Return how far the memory of this process grows while `function` runs: of tensors on CUDA, of all on CPU."""
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        function()
        return torch.cuda.max_memory_allocated() - before
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak is from now on
    before = _status("VmRSS")
    function()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024
