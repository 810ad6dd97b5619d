"""Several engines as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any, Protocol

from trainer.generation.engine import Completion, Request, Sampling
from trainer.generation.weight_sync import WeightSource


class Pending(Protocol):
    """Calls under way; `result` waits for them and raises what the first of them raised."""

    def result(self) -> list[Any]: ...


class Group(Protocol):
    """Engines that are called together, in this process or in others."""

    def __len__(self) -> int: ...

    def call(self, method: str, *args: Any) -> list[Any]: ...

    def call_each(self, method: str, args: Sequence[tuple]) -> list[Any]: ...

    def start(self, method: str, *args: Any) -> Pending: ...


class EnginePool:
    """Spreads requests over the engines of `group` and keeps their weights at one version."""

    def __init__(self, group: Group, version: int = 0):
        self._group = group
        self._version = version

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Completions in the order of the requests."""
        shares = split(requests, len(self._group), sampling.max_tokens)
        results = self._group.call_each("generate", [([requests[i] for i in rows], sampling) for rows in shares])
        completions: dict[int, Completion] = {}
        for rows, part in zip(shares, results, strict=True):
            completions.update(zip(rows, part, strict=True))
        stale = {c.weight_version for c in completions.values()} - {self._version}
        assert not stale, f"completions of weights {stale}, expected {self._version}"
        return [completions[i] for i in range(len(requests))]

    def sync_weights(self, source: WeightSource, version: int, sending: Pending | None = None) -> None:
        """Give all engines the weights of `source`.

        Args:
            sending: the sending side of a broadcast, already begun. When either side fails, the other may
                wait for it in vain: the failure is raised at once, and the job cannot go on.
        """
        receiving = self._group.start("sync_weights", source, version)
        if sending is None:
            receiving.result()
        else:
            _first_failure(receiving.result, sending.result)
        self._version = version

    def set_version(self, version: int) -> None:
        """Name the weights that the engines were started with."""
        self._group.call("set_version", version)
        self._version = version

    def sleep(self) -> None:
        """Let the engines give back the GPU memory that they share with the ranks."""
        self._group.call("sleep")

    def wake(self) -> None:
        """Ready the engines for `generate`."""
        self._group.call("wake")

    def shutdown(self) -> None:
        """End the engines."""
        self._group.call("shutdown")


def split(requests: Sequence[Request], engines: int, max_tokens: int) -> list[list[int]]:
    """Indices of the requests for each engine, balanced by the tokens they take at most.

    Requests of one prompt stay together, so that its prefix is computed once.
    """
    prompts: dict[tuple[int, ...], list[int]] = {}
    for i, request in enumerate(requests):
        prompts.setdefault(tuple(request.prompt_token_ids), []).append(i)
    cost = {prompt: len(prompt) + len(rows) * max_tokens for prompt, rows in prompts.items()}
    shares: list[list[int]] = [[] for _ in range(engines)]
    loads = [0] * engines
    for prompt in sorted(prompts, key=lambda prompt: (-cost[prompt], prompts[prompt][0])):
        least = loads.index(min(loads))
        shares[least].extend(prompts[prompt])
        loads[least] += cost[prompt]
    return shares


def _first_failure(*waits: Callable[[], Any]) -> None:
    """Wait for all, or for the first that raises, and raise that."""
    threads = ThreadPoolExecutor(len(waits))
    try:
        done, _ = wait([threads.submit(one) for one in waits], return_when=FIRST_EXCEPTION)
        for one in done:
            one.result()
    finally:
        threads.shutdown(wait=False)
