"""Ranks that stay up and answer calls, as those of a job do, without Ray."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import Empty
from types import TracebackType
from typing import Any

from tests.support.ranks import run_ranks
from trainer.config import Config
from trainer.workers.rank import Rank


class ServedRanks:
    """`world_size` connected ranks with the interface of an actor group: `with ServedRanks(2, cfg) as ranks`."""

    def __init__(self, world_size: int, cfg: Config):
        self._manager = multiprocessing.get_context("spawn").Manager()
        self._calls = [self._manager.Queue() for _ in range(world_size)]
        self._results = [self._manager.Queue() for _ in range(world_size)]
        self._thread = ThreadPoolExecutor(1)
        self._group = self._thread.submit(run_ranks, world_size, _serve, self._calls, self._results, cfg=cfg)

    def start(self, method: str | Callable[..., Any], *args: Any) -> ServedPending:
        for calls in self._calls:
            calls.put((method, args))
        return ServedPending(self._results, self._group)

    def call(self, method: str | Callable[..., Any], *args: Any) -> list[Any]:
        return self.start(method, *args).result()

    def __enter__(self) -> ServedRanks:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for calls in self._calls:
            calls.put(None)
        try:
            self._group.result()
        finally:
            self._thread.shutdown()
            self._manager.shutdown()


class ServedPending:
    def __init__(self, results: list[Any], group: Any):
        self._results = results
        self._group = group

    def result(self) -> list[Any]:
        return [self._next(results) for results in self._results]

    def _next(self, results: Any) -> Any:
        while True:
            try:
                return results.get(timeout=0.5)
            except Empty:
                if self._group.done():  # a rank raised: so does this
                    self._group.result()


def _serve(rank: Rank, calls: list[Any], results: list[Any]) -> None:
    while (call := calls[rank.rank].get()) is not None:
        method, args = call
        function = partial(method, rank) if callable(method) else getattr(rank, method)
        results[rank.rank].put(function(*args))
