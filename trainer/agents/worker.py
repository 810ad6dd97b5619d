"""Agents in their process: each is made, runs once, and its result is checked."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from trainer.environments.base import AgentResult, Endpoint, find_environment
from trainer.environments.worker import RESERVED, UserObjects, checks_value, reach_without_proxy, read_numbers
from trainer.rewards.parsing import read_number
from trainer.sandbox import limits
from trainer.sandbox.worker import UserThreads

RESERVED_METRICS = RESERVED | {"samples", "errors"}
"""Names of metrics that no agent may have."""


class AgentHandler(UserObjects):
    """Makes the calls `[number, "run", row, seed, endpoint]` of agents, and `[number, "cancel"]`, which ends one.

    An agent that is not `async` runs in a thread. Nothing can end a thread: after `cancel`, nobody waits for it. If an
    `async` one goes on after `cancel`, or too many threads do, the process must end.
    """

    is_concurrent = True

    def __init__(self, name: str, options: dict[str, Any]):
        super().__init__(find_environment(name), options)
        reach_without_proxy("127.0.0.1", "localhost")
        self._running: dict[int, asyncio.Task[Any]] = {}
        self._threads = UserThreads("agent")

    def is_async(self, call: list[Any]) -> bool:
        return True

    async def compute(self, call: list[Any]) -> dict[str, Any]:
        number, method, *arguments = call
        if method == "cancel":
            if number in self._running:
                self._running[number].cancel()
                _, left = await asyncio.wait([self._running[number]], timeout=limits.CANCEL_S)
                self.must_end |= bool(left)
            return {}
        task = asyncio.ensure_future(self._run(*arguments))
        self._running[number] = task
        try:
            value = await task
            with checks_value(getattr(self._kind, "run", self._kind)):
                return _result(value)
        finally:
            del self._running[number]

    async def _run(self, row: Mapping[str, Any], seed: int, endpoint: dict[str, str]) -> Any:
        reach_without_proxy(urlsplit(endpoint["base_url"]).hostname or "")
        agent, given = self._make(), (row, seed, Endpoint(**endpoint))
        if inspect.iscoroutinefunction(agent.run):
            return await agent.run(*given)
        try:
            return await self._threads.run(agent.run, *given)
        except asyncio.CancelledError:
            self.must_end |= self._threads.too_many_left
            raise


def _result(value: Any) -> dict[str, Any]:
    """Return the fields of what an agent has returned.

    Raises:
        TypeError, ValueError: it is no result.
    """
    if not all(hasattr(value, name) for name in ("reward", "rewards", "metrics")):
        reward = read_number(value)
        if isinstance(reward, str):
            raise TypeError(f"it must be a trainer.environments.AgentResult or a number, not {value!r:.80}")
        value = AgentResult(reward)
    return read_numbers(value, RESERVED_METRICS, "episode")
