"""The stages of the start-up: what the job is loading, and since when.

`with stage("loading the model"):` names the current stage for the progress display (`metrics/progress.py`). The
beginning and the end of a stage are safe points, at which a signal may end the job.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from trainer.process.signals import SIGNALS
from trainer.process.tracing import TRACER

DISPLAY_THREAD = "start-up display"  # name of the thread that shows the stages
_running: tuple[tuple[str, float], ...] = ()  # names and start times, outermost first


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Name what the job does while the block runs. Stages may nest. For the main thread. A signal raises Stopped."""
    global _running
    SIGNALS.check()
    outer, _running = _running, (*_running, (name, time.monotonic()))
    try:
        with TRACER.span(name):
            yield
    finally:
        _running = outer
    SIGNALS.check()


def running_stage() -> tuple[str, float] | None:
    """Return the innermost running stage and its start time on the clock `time.monotonic`. Thread-safe."""
    stages = _running
    return stages[-1] if stages else None


@contextmanager
def importing() -> Iterator[None]:
    """Import in the block without garbage collections, which would take a fifth of the time and find nothing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def noting_processes() -> Iterator[None]:
    """Let the processes that the block starts end with this one. Those of this package, which may start meanwhile, end
    by themselves."""
    import psutil

    before = set(psutil.Process().children())
    try:
        yield
    finally:
        for process in set(psutil.Process().children()) - before:
            with suppress(psutil.Error):
                if "trainer" not in " ".join(process.cmdline()):
                    SIGNALS.end_with_this(process.pid)
