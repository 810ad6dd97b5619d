"""An engine whose GPU memory is written to a file when it runs out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from trainer.generation.engine import Engine
from trainer.parallel.profiling import memory_snapshots, snapshot_path


class MemoryWatch:
    """Passes all calls to an engine. If one of them runs out of memory in this process, a snapshot is written."""

    def __init__(self, engine: Engine, path: str):
        self._engine: Any = engine
        self._path = path

    @classmethod
    def build(cls, make: Callable[[], Engine], run_dir: str, number: int, has_workers: bool = False) -> Engine:
        """Return the engine that `make` makes, watched from its construction on.

        Args:
            has_workers: the memory is that of other processes, which the engine lets watch themselves.
        """
        path = snapshot_path(run_dir, f"engine_{number}")
        with snapshots(path):
            engine: Any = cls(make(), path)
        if has_workers and hasattr(engine, "watch_workers"):
            engine.watch_workers(path)
        return engine

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._engine, name)
        return _watched(attribute, self._path) if callable(attribute) else attribute


def watch_methods(watched: Any, names: Sequence[str], path: str) -> None:
    """Let those of these methods that an object has write a snapshot to `path` if they run out of memory."""
    for name in names:
        if (method := getattr(watched, name, None)) is not None:
            setattr(watched, name, _watched(method, path))


def _watched(method: Callable[..., Any], path: str) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*arguments: Any, **named: Any) -> Any:
        with snapshots(path):
            return method(*arguments, **named)

    return call


def snapshots(path: str) -> AbstractContextManager[None]:
    """Return a context that writes a snapshot to `path` if the GPU's memory runs out in it."""
    return memory_snapshots(path, torch.cuda.memory._dump_snapshot)
