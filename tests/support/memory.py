"""The memory that tensors take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile


def peak_bytes(function: Callable[[], Any]) -> int:
    """The most host memory that tensors of `function` take at one time, by the events of torch's allocator."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        function()
    events = recorded.profiler.kineto_results.events()  # type: ignore[union-attr]
    taken = peak = 0
    for event in sorted((event for event in events if event.name() == "[memory]"), key=lambda event: event.start_ns()):
        taken += event.nbytes()
        peak = max(peak, taken)
    return peak
