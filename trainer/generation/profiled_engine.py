"""An engine that is profiled while it has the weights of some steps (`trainer.profile`)."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Collection
from typing import Any, Protocol

from trainer.generation.engine import Engine
from trainer.parallel.profiling import TorchProfiler, step_directory, warn_not_written
from trainer.process.tracing import TRACER

PROFILED_S = 10.0
"""How long a profiled engine generates before its profile ends."""


class Profiler(Protocol):
    """Profiles an engine: `TorchProfiler` of `trainer.parallel.profiling`, or the engine's own."""

    def start(self, directory: str, name: str) -> None: ...
    def stop(self) -> None: ...
    def wait(self) -> None: ...


class ProfiledEngine:
    """Passes all calls to an engine, and profiles it while it has the weights that some steps begin with.

    With `rollout.ahead` the engine may generate for later steps meanwhile. A profile ends after `PROFILED_S` of
    generating: a whole rollout could need more memory than there is, and take long to write. An engine that can be
    interrupted returns from its call then; with another one the profile lasts until the call ends.

    Args:
        steps: the steps to profile. Version N of the weights is what step N begins with.
        directory: returns the directory for the files of a step.
        name: of the files.
    """

    def __init__(
        self, engine: Engine, profiler: Profiler, steps: Collection[int], directory: Callable[[int], str], name: str
    ):
        self._engine: Any = engine
        self._profiler = profiler
        self._steps = steps
        self._directory = directory
        self._name = name
        self._version: int | None = None
        """That is profiled."""
        self._left_s = 0.0  # of generating until the profile ends
        self._interrupt: Callable[[], None] | None = getattr(engine, "interrupt", None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(self, *arguments: Any) -> Any:
        """Generate (see `Engine`)."""
        return self._count(self._engine.generate, *arguments)

    def step(self, *arguments: Any) -> Any:
        """Generate until some requests are complete (see `StreamingEngine`)."""
        return self._count(self._engine.step, *arguments)

    def sync_weights(self, source: Any, version: int, *arguments: Any) -> None:
        """Load weights (see `Engine`)."""
        self._end(version)
        self._engine.sync_weights(source, version, *arguments)
        self._begin(version)

    def set_version(self, version: int) -> None:
        """Set the version of the weights (see `Engine`)."""
        self._end(version)
        self._engine.set_version(version)
        self._begin(version)

    def shutdown(self) -> None:
        """End the profile and the engine."""
        self._end(None)
        self._profiler.wait()
        self._engine.shutdown()

    def _begin(self, version: int) -> None:
        if version in self._steps and self._version is None:
            self._profiler.start(self._directory(version), self._name)
            self._version, self._left_s = version, PROFILED_S

    def _count(self, call: Callable[..., Any], *arguments: Any) -> Any:
        if self._left_s <= 0:
            return call(*arguments)
        began, timer = time.monotonic(), None
        if self._interrupt is not None:
            timer = threading.Timer(self._left_s, self._interrupt)
            timer.daemon = True
            timer.start()
        try:
            result = call(*arguments)
        finally:
            if timer is not None:
                timer.cancel()
        self._left_s -= time.monotonic() - began
        if self._left_s <= 0:
            self._profiler.stop()
        return result

    def _end(self, version: int | None) -> None:
        if self._version is not None and self._version != version:
            if self._left_s > 0:
                self._profiler.stop()
            self._version, self._left_s = None, 0.0


def profile_engine(
    engine: Engine, profiles_itself: bool, steps: Collection[int], run_dir: str, number: int, device: str
) -> ProfiledEngine:
    """Return the engine so that it is profiled while it has the weights of `steps`."""
    profiler = OwnProfiler(engine) if profiles_itself else TorchProfiler(device, in_background=True)
    return ProfiledEngine(engine, profiler, steps, functools.partial(step_directory, run_dir), f"engine_{number}")


class OwnProfiler:
    """The profiler of an engine with `EngineSpec.profiles`. Its failure costs the profile alone.

    Its exceptions are of any type. If the engine has died, its next call says so.
    """

    def __init__(self, engine: Any):
        self._engine = engine
        self._directory = ""  # empty: there is no profile
        self._name = ""

    def start(self, directory: str, name: str) -> None:
        self._directory, self._name = "", name
        try:
            os.makedirs(directory, exist_ok=True)
            self._engine.start_profile(name)
        except Exception as error:
            warn_not_written(os.path.join(directory, name), error)
        else:
            self._directory = directory

    def stop(self) -> None:
        if not self._directory:
            return
        try:
            with TRACER.span("write the profile"):
                self._engine.stop_profile(self._directory)
        except Exception as error:
            warn_not_written(os.path.join(self._directory, self._name), error)

    def wait(self) -> None:
        """Return: `stop` has written the files."""
