"""Engines in processes of their own, as the actors of a job have them, and groups of engines without Ray."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

from trainer.cluster.launcher import HOST

_engines: dict[int, Any] = {}


def _build(factory: Any, args: tuple, kwargs: dict[str, Any]) -> int:
    name = len(_engines)
    _engines[name] = factory(*args, **kwargs)
    return name


def _call(name: int, method: str, args: tuple) -> Any:
    return getattr(_engines[name], method)(*args)


class EngineProcess:
    """A process that hosts engines. vLLM is imported once for all of them, and never in the tests' own process:
    there it would join a process group and change how torch sets its threads."""

    def __init__(self) -> None:
        self._pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))

    def build(self, factory: Any, *args: Any, **kwargs: Any) -> RemoteEngine:
        """`factory(*args, **kwargs)` over there; returns at once."""
        return RemoteEngine(self._pool, self._pool.submit(_build, factory, args, kwargs))

    def close(self) -> None:
        self._pool.shutdown()


class RemoteEngine:
    """An engine in an `EngineProcess`; its methods wait for their results."""

    def __init__(self, pool: ProcessPoolExecutor, name: Future[int]):
        self._pool = pool
        self._name = name

    def start(self, method: str, *args: Any) -> Future[Any]:
        return self._pool.submit(_call, self._name.result(), method, args)

    def __getattr__(self, method: str) -> Any:
        return lambda *args: self.start(method, *args).result()


class LocalGroup:
    """Engines, remote or not, with the interface of an actor group."""

    def __init__(self, engines: Sequence[Any]):
        self._engines = list(engines)
        self._threads = ThreadPoolExecutor(len(self._engines))

    def __len__(self) -> int:
        return len(self._engines)

    def start(self, method: str, *args: Any) -> LocalPending:
        return LocalPending([self._threads.submit(getattr(engine, method), *args) for engine in self._engines])

    def call(self, method: str, *args: Any) -> list[Any]:
        return self.start(method, *args).result()

    def call_each(self, method: str, args: Sequence[tuple]) -> list[Any]:
        return [getattr(engine, method)(*own) for engine, own in zip(self._engines, args, strict=True)]

    def where(self) -> list[dict[str, Any]]:
        return [{"host": HOST}] * len(self)


class LocalPending:
    def __init__(self, futures: list[Future[Any]]):
        self._futures = futures

    def result(self) -> list[Any]:
        return [future.result() for future in self._futures]
