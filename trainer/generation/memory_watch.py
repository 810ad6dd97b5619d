"""An engine whose GPU memory is written to a file when it runs out."""

from __future__ import annotations

import functools
from collections.abc import Callable
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
    def build(cls, make: Callable[[], Engine], run_dir: str, number: int) -> Engine:
        """Return the engine that `make` makes, watched from its construction on."""
        path = snapshot_path(run_dir, f"engine_{number}")
        with _snapshots(path):
            engine: Any = cls(make(), path)
        return engine

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._engine, name)
        if not callable(attribute):
            return attribute

        @functools.wraps(attribute)
        def call(*arguments: Any, **named: Any) -> Any:
            with _snapshots(self._path):
                return attribute(*arguments, **named)

        return call


def _snapshots(path: str) -> AbstractContextManager[None]:
    return memory_snapshots(path, torch.cuda.memory._dump_snapshot)
