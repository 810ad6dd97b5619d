"""An engine that is profiled while it has the weights of some steps (`trainer.profile`)."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection
from typing import Any, Protocol

from trainer.generation.engine import Engine
from trainer.parallel.profiling import TorchProfiler, step_directory, warn_not_written
from trainer.process.tracing import TRACER


class Profiler(Protocol):
    """Profiles an engine: `TorchProfiler` of `trainer.parallel.profiling`, or the engine's own."""

    def start(self, directory: str, name: str) -> None: ...
    def stop(self) -> None: ...


class ProfiledEngine:
    """Passes all calls to an engine, and profiles it while it has the weights that some steps begin with.

    With `rollout.ahead` the engine may generate for later steps meanwhile.

    Args:
        steps: the steps to profile. Version N of the weights is what step N begins with.
        directory: returns the directory for the files of a step.
        name: of the files.
    """

    def __init__(
        self, engine: Engine, profiler: Profiler, steps: Collection[int], directory: Callable[[int], str], name: str
    ):
        self._engine = engine
        self._profiler = profiler
        self._steps = steps
        self._directory = directory
        self._name = name
        self._version: int | None = None
        """That is profiled."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

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
        self._engine.shutdown()

    def _begin(self, version: int) -> None:
        if version in self._steps and self._version is None:
            self._profiler.start(self._directory(version), self._name)
            self._version = version

    def _end(self, version: int | None) -> None:
        if self._version is not None and self._version != version:
            with TRACER.span("write the profile"):
                self._profiler.stop()
            self._version = None


def profile_engine(
    engine: Engine, profiles_itself: bool, steps: Collection[int], run_dir: str, number: int, device: str
) -> ProfiledEngine:
    """Return the engine so that it is profiled while it has the weights of `steps`."""
    profiler = OwnProfiler(engine) if profiles_itself else TorchProfiler(device)
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
            self._engine.stop_profile(self._directory)
        except Exception as error:
            warn_not_written(os.path.join(self._directory, self._name), error)
