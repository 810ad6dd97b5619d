"""What a job is loading, and since when.

`with stage("loading the model"):` names the stage for the display of the start-up (`metrics/progress.py`). The
beginning and the end of a stage are safe points, at which a signal may end the job.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from trainer.process.signals import SIGNALS

_running: tuple[tuple[str, float], ...] = ()  # names and starts, outermost first


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Say that the block is what the job is doing. Stages may nest. Only for the main thread.

    Raises:
        Stopped: a signal arrived.
    """
    global _running
    SIGNALS.check()
    outer, _running = _running, (*_running, (name, time.monotonic()))
    try:
        yield
    finally:
        _running = outer
    SIGNALS.check()


def running_stage() -> tuple[str, float] | None:
    """Return the innermost running stage and its start, on the clock `time.monotonic`. Thread-safe."""
    stages = _running
    return stages[-1] if stages else None
