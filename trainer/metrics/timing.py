"""The duration of each phase of a step and of each stage of the start; FLOPs of training, and the peaks of devices."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trainer.metrics.names import METRICS, PHASES
from trainer.process import time_limits
from trainer.process.signals import SIGNALS
from trainer.process.startup import DISPLAY_THREAD, running_stage
from trainer.process.tracing import TRACER

LOG = logging.getLogger(__name__)

_PEAK_FLOPS: dict[str, float | None] = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H200 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "B200": 2250e12,
    "RTX 4090 D": None,
    "RTX 4090 Laptop": None,
    "RTX 4090": 165e12,
}
"""By a substring of the device's name. A longer name precedes a shorter one that it contains. None: not known, and not
that of the shorter name. Sources: NVIDIA's data sheets of these GPUs and the white paper "NVIDIA Ada GPU Architecture",
with sums in float32. `trainer.plan.hardware` takes its peaks from here."""


class Timer:
    """Adds up seconds per phase until `pop`. Different phases may nest, and a phase may run several times.

    >>> timer = Timer()
    >>> with timer("step"):
    ...     with timer("rollout"):
    ...         timer.running()[0]
    'rollout'
    >>> sorted(timer.pop())
    ['time/rollout', 'time/step']
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._running: tuple[tuple[str, float], ...] = ()  # phases and their start times, outermost first

    @contextmanager
    def __call__(self, phase: str, **details: Any) -> Iterator[None]:
        """Time the block as `time/{phase}`, even if it raises. It is also a span of the timeline, with `details`."""
        assert phase not in dict(self._running), f"{phase} is running already: its seconds would count twice"
        outer, start = self._running, time.monotonic()
        self._running = (*outer, (phase, start))
        try:
            yield
        finally:
            self._running, end = outer, time.monotonic()
            self.add(phase, end - start)
            TRACER.add(phase, start, end, **details)

    def add(self, phase: str, seconds: float) -> None:
        """Add seconds that were measured elsewhere."""
        name = f"time/{phase}"
        assert name in METRICS, f"{name} is not a metric"
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def pop(self) -> dict[str, float]:
        """Return the seconds of each phase that ended since the last call, as `time/{phase}`."""
        seconds, self._seconds = self._seconds, {}
        return seconds

    def running(self) -> tuple[str, float] | None:
        """Return the innermost running phase of a step and its seconds so far, or None between phases. Thread-safe."""
        phases = [(phase, start) for phase, start in self._running if phase in PHASES]
        return (phases[-1][0], time.monotonic() - phases[-1][1]) if phases else None


def clock(seconds: float) -> str:
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


@contextmanager
def logged_stages() -> Iterator[None]:
    """Log each stage of the start that takes more than some seconds (see `trainer.process.startup`)."""
    is_over = threading.Event()

    def show() -> None:
        announced = None
        while not is_over.wait(time_limits.POLL_INTERVAL_S):
            stage = running_stage()
            if stage not in (None, announced) and time.monotonic() - stage[1] > time_limits.LONG_STAGE_S:
                announced = stage
                LOG.info("%s …", stage[0])

    thread = threading.Thread(target=show, name=DISPLAY_THREAD, daemon=True)
    with SIGNALS.blocked():
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def peak_flops(device_name: str) -> float | None:
    """Return the dense bfloat16 FLOP/s of a GPU from its data sheet, or None for CPUs and GPUs that are not listed."""
    return next((flops for name, flops in _PEAK_FLOPS.items() if name in device_name), None)


def model_flops(tokens: float, parameters: int, trained: int, epochs: float, forward_passes: float) -> float:
    """Return the FLOPs of a step: `forward_passes` for log-probs before the update, and `epochs` passes of the update.

    A forward pass takes 2 FLOP per parameter and token. An update takes one more forward pass, as much again for the
    gradients of activations, and as much again for the gradients of trained weights (Kaplan et al., 2020).
    """
    return tokens * (2 * forward_passes * parameters + epochs * (4 * parameters + 2 * trained))
