"""Agents in their own processes: one that hangs, raises or crashes costs at most its episode."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

from trainer.agents.episode import AgentEpisode
from trainer.config import EnvironmentConfig
from trainer.environments.base import AgentResult, Endpoint
from trainer.process import time_limits
from trainer.sandbox.limits import CANCEL_S, LARGEST_REWARD, MAX_ASYNC_SESSIONS, MAX_ATTEMPTS
from trainer.sandbox.pool import Call, CallFailed, CallLost, Calls, WorkerPool

_NUMBERS = itertools.count()
_LIMIT = "environment.timeout_s"


class AgentSession:
    """The agent of one episode on the driver. One that fails, or is late, runs again from the start, at a new address.

    Args:
        timeout_s: see `AgentRunner`.
        begin: returns a new episode of the endpoint.
        end: ends one.
        post: calls a function on the thread of the endpoint.
    """

    def __init__(
        self,
        row: Any,
        seed: int,
        timeout_s: float,
        begin: Callable[[], AgentEpisode],
        end: Callable[[AgentEpisode], None],
        post: Callable[[Callable[[], None]], None],
    ):
        self.result: AgentResult | None = None
        """None: the agent has failed."""
        self.status = self.failure = ""
        """Why the episode has ended: `timeout` or `failed` if the agent has failed. And the reason."""
        self.error = ""
        """What the agent has raised after a limit. Then it has not failed, but has no reward."""
        self._row, self._seed, self._timeout_s = row, seed, timeout_s
        self._begin, self._end, self._post = begin, end, post
        self.episode = begin()

    async def run(self, calls: Calls) -> None:
        """Run the agent until it has ended, or has failed for good.

        Raises:
            WorkerError: the processes cannot start.
        """
        failures, is_alone, too_slow = 0, False, f"run took longer than {_LIMIT}={self._timeout_s:g}"
        while not self.status:
            attempt = _Attempt(self.episode, self._timeout_s)
            try:
                value = await attempt.run(calls, self._row, self._seed, is_alone, self._post)
            except CallLost as lost:
                is_alone = is_alone or lost.is_suspect
                failures += attempt.is_late
                status, reason = "timeout", too_slow
            except CallFailed as failed:
                failures += 1
                status, reason = failed.status, f"run {failed.reason}"
                if attempt.is_late or status == "timeout":
                    status, reason = "timeout", too_slow
                elif status == "raised" and self.episode.limit:  # it does not know what to do without the reply
                    self.result, self.error, self.status = AgentResult(), failed.reason, self.episode.limit
                    return
            else:
                self._take(value)
                return
            if failures >= MAX_ATTEMPTS:
                self.status, self.failure = "timeout" if status == "timeout" else "failed", reason
                return
            self._end(self.episode)
            self.episode = self._begin()

    def _take(self, value: Any) -> None:
        match value:
            case {"reward": float(reward), "rewards": dict(rewards), "metrics": dict(metrics)}:
                result = AgentResult(reward, rewards, metrics)
            case _:
                self.status, self.failure = "failed", "has written into the pipe of its process"
                return
        total = reward + sum(rewards.values())
        if abs(total) <= LARGEST_REWARD:
            self.result, self.status = result, self.episode.limit or "stop"
        else:
            self.status = "failed"
            self.failure = f"gave rewards that add up to {total:g}, beyond {LARGEST_REWARD:g}"


class _Attempt:
    """One run of an agent. If it takes too long, it is cancelled; if it does not end then, its process is replaced."""

    def __init__(self, episode: AgentEpisode, timeout_s: float):
        self.is_late = False
        self._number = next(_NUMBERS)
        self._episode = episode
        self._timeout_s = timeout_s

    async def run(
        self, calls: Calls, row: Any, seed: int, is_alone: bool, post: Callable[[Callable[[], None]], None]
    ) -> Any:
        """Return what the agent has returned (see `Calls.ask`)."""
        episode = self._episode
        endpoint = dataclasses.asdict(Endpoint(episode.base_url, episode.secret, episode.rules.model))
        call = Call(
            [self._number, "run", row, seed, endpoint],
            "agent",
            (_LIMIT, math.inf),  # the time of the policy must not count (see `AgentRunner`)
            is_alone=is_alone,
            is_session=True,
            ends_session=True,
            on_sent=lambda: post(episode.start_clock),
        )
        asked = asyncio.ensure_future(calls.ask(call))
        try:
            while not (await asyncio.wait([asked], timeout=time_limits.POLL_INTERVAL_S))[0]:
                if not self.is_late and episode.idle_s() > self._timeout_s:
                    self.is_late = True
                    calls.begin(self._cancel(calls, call.worker))
        finally:
            asked.cancel()  # if it has not ended
        return await asked

    async def _cancel(self, calls: Calls, worker: Any) -> None:
        limit = (_LIMIT, self._timeout_s + CANCEL_S)
        with contextlib.suppress(CallLost, CallFailed):
            await calls.ask(
                Call([self._number, "cancel"], "cancel", limit, is_session=True, is_urgent=True, worker=worker)
            )


class AgentPool(WorkerPool):
    """`environment.num_processes` processes that run agents. A context manager."""

    def __init__(self, config: EnvironmentConfig):
        super().__init__(
            "trainer.agents.worker:AgentHandler",
            [config.name, dict(config.kwargs)],
            config.num_processes,
            role="environment",
            name=f"environment.name={config.name}",
            limit=(_LIMIT, config.timeout_s),
            concurrency=MAX_ASYNC_SESSIONS,
        )
