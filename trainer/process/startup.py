"""The stages of the start-up: what the job is loading, and since when.

`with stage("loading the model"):` names the current stage for the progress display (`metrics/progress.py`). The
beginning and the end of a stage are safe points, at which a signal may end the job.
"""

from __future__ import annotations

import gc
import importlib.metadata
import sys
import time
from collections import UserDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any

from trainer.process.signals import SIGNALS
from trainer.process.tracing import TRACER

DISPLAY_THREAD = "start-up display"  # name of the thread that shows the stages
_read_distributions = importlib.metadata.packages_distributions
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
    was_enabled, before = gc.isenabled(), len(sys.modules)
    gc.disable()
    importlib.metadata.packages_distributions = _Distributions
    try:
        yield
    finally:
        importlib.metadata.packages_distributions = _read_distributions
        if was_enabled:
            if len(sys.modules) > before + 500:  # of large libraries, which nobody unloads
                gc.freeze()  # else the next collection would look at all that they have made
            gc.enable()


class _Distributions(UserDict[str, list[str]]):
    """What `packages_distributions` returns. To read it takes a third of the time of the import of transformers, which
    asks for packages that have the names of their distributions."""

    data = cached_property(lambda _: dict(_read_distributions()))  # type: ignore[assignment]

    def __init__(self) -> None:
        pass

    def get(self, key: str, default: Any = None) -> Any:
        found = importlib.metadata.Distribution.discover(name=key)
        return [key] if any(found) else super().get(key, default)


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
