"""Several engines as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from trainer.rollout.engine import Completion, Request, Sampling
from trainer.rollout.weight_sync import WeightSource


class Group(Protocol):
    """Engines that are called together, in this process or in others."""

    def __len__(self) -> int: ...

    def call(self, method: str, *args: Any) -> list[Any]: ...

    def call_each(self, method: str, args: Sequence[tuple]) -> list[Any]: ...


class EnginePool:
    """Spreads requests over the engines of `group` and keeps their weights at one version."""

    def __init__(self, group: Group):
        self._group = group
        self._version = 0

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Completions in the order of the requests."""
        shares = split(requests, len(self._group))
        results = self._group.call_each("generate", [([requests[i] for i in rows], sampling) for rows in shares])
        completions: dict[int, Completion] = {}
        for rows, part in zip(shares, results, strict=True):
            completions.update(zip(rows, part, strict=True))
        stale = {c.weight_version for c in completions.values()} - {self._version}
        assert not stale, f"completions of weights {stale}, expected {self._version}"
        return [completions[i] for i in range(len(requests))]

    def sync_weights(self, source: WeightSource, version: int) -> None:
        """Give all engines the weights of `source`."""
        self._group.call("sync_weights", source, version)
        self._version = version

    def set_version(self, version: int) -> None:
        """Name the weights that the engines were started with."""
        self._group.call("set_version", version)
        self._version = version

    def sleep(self) -> None:
        self._group.call("sleep")

    def wake(self) -> None:
        self._group.call("wake")

    def shutdown(self) -> None:
        self._group.call("shutdown")


def split(requests: Sequence[Request], engines: int) -> list[list[int]]:
    """Indices for each engine. Requests of one prompt stay together, so that its prefix is computed once;
    the shares differ by one prompt at most."""
    prompts: dict[tuple[int, ...], list[int]] = {}
    for i, request in enumerate(requests):
        prompts.setdefault(tuple(request.prompt_token_ids), []).append(i)
    shares: list[list[int]] = [[] for _ in range(engines)]
    for rows in sorted(prompts.values(), key=lambda rows: (-len(rows), rows[0])):
        min(shares, key=len).extend(rows)
    return shares
