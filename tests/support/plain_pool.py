"""What tests of a pool of plain engines share."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

from tests.support import plain_engine
from tests.support.generation import SAMPLED, tokens_of
from tests.support.plain_engine import PlainRanks
from trainer.config.engines import EngineSpec
from trainer.generation.engine import Completion, Request
from trainer.generation.engine_pool import EnginePool

StartPool = Callable[..., tuple[EnginePool, PlainRanks]]
"""Starts a pool of plain engines, and the ranks of their policy."""


def streaming(engine: str = "StreamingEngine") -> EngineSpec:
    return dataclasses.replace(plain_engine.SPEC, path=f"{plain_engine.__name__}:{engine}", unit="request")


def answers(pool: EnginePool, prompts: int | Sequence[int] = 2) -> list[list[int]]:
    numbers = range(prompts) if isinstance(prompts, int) else prompts
    return tokens_of(pool.generate([Request([i], 7, SAMPLED) for i in numbers]))


def begin(pool: EnginePool, requests: Sequence[Request]) -> Future[list[Completion]]:
    """Begin to ask for completions, while the test does other things."""
    return pool.loop.start(pool.complete_together(requests))


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until another thread or process has made `condition` true."""
    while not condition():
        threading.Event().wait(0.01)


def fault(directory: Path, *names: str) -> None:
    """Let the next engine that generates a request of prompt N fail: `KIND N` (see `plain_engine.FaultyEngine`)."""
    for name in names:
        (directory / f"fault {name}").touch()
