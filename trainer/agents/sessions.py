"""Agents in their own processes: one that hangs, raises or crashes costs at most its episode."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Callable
from typing import Any

from trainer.agents.episode import AgentEpisode
from trainer.environments.base import AgentResult, Endpoint
from trainer.process import time_limits
from trainer.sandbox.limits import LARGEST_REWARD, MAX_ATTEMPTS
from trainer.sandbox.pool import Call, CallFailed, CallLost, Calls

_LIMIT = "environment.timeout_s"


class AgentSession:
    """The agent of one episode on the driver. One that fails, or is late, runs again from the start, at a new address.

    Args:
        timeout_s: see `AgentRunner`.
        begin: returns a new episode of the endpoint.
        end: ends one.
        episode_id: see `Endpoint`.
    """

    def __init__(
        self,
        row: Any,
        seed: int,
        timeout_s: float,
        begin: Callable[[], AgentEpisode],
        end: Callable[[AgentEpisode], None],
        episode_id: str = "",
    ):
        self.result: AgentResult | None = None
        """None: the agent has failed."""
        self.status = self.failure = ""
        """Why the episode has ended: `timeout` or `failed` if the agent has failed. And the reason."""
        self.error = ""
        """What the agent has raised after a limit. Then it has not failed, but has no reward."""
        self._row, self._seed, self._timeout_s = row, seed, timeout_s
        self._begin, self._end, self._episode_id = begin, end, episode_id
        self.episode = begin()

    async def run(self, calls: Calls) -> None:
        """Run the agent until it has ended, or has failed for good.

        Raises:
            WorkerError: the processes cannot start.
        """
        failures, is_alone = 0, False
        while not self.status:
            try:
                self._take(await self._attempt(calls, is_alone))
                return
            except CallLost as lost:
                is_alone = is_alone or lost.is_suspect
            except CallFailed as failed:
                failures += 1
                if failed.status == "raised" and self.episode.limit:  # it does not know what to do without the reply
                    self.result, self.error, self.status = AgentResult(), failed.reason, self.episode.limit
                    return
                if failures >= MAX_ATTEMPTS:
                    self.status = "timeout" if failed.status == "timeout" else "failed"
                    self.failure = f"run {failed.reason}"
                    return
            self._end(self.episode)
            self.episode = self._begin()

    async def _attempt(self, calls: Calls, is_alone: bool) -> Any:
        """Return what the agent has returned (see `Calls.ask`). One that takes too long is ended."""
        episode = self.episode
        endpoint = dataclasses.asdict(Endpoint(episode.base_url, episode.secret, episode.rules.model, self._episode_id))
        call = Call(
            [0, "run", self._row, self._seed, endpoint],
            "agent",
            (_LIMIT, math.inf),  # the time of the policy must not count (see `AgentRunner`)
            is_alone=is_alone,
            is_session=True,
            ends_session=True,
            on_sent=episode.start_clock,
        )
        asked = asyncio.ensure_future(calls.ask(call))
        try:
            while not (await asyncio.wait([asked], timeout=time_limits.POLL_INTERVAL_S))[0]:
                if episode.idle_s() > self._timeout_s:
                    raise CallFailed("timeout", f"took longer than {_LIMIT}={self._timeout_s:g}")
        finally:
            asked.cancel()  # if it has not ended
        return await asked

    def _take(self, value: Any) -> None:
        match value:
            case {
                "reward": float(reward),
                "rewards": dict(rewards),
                "metrics": dict(metrics),
                "player_rewards": dict(of_players),
            }:
                result = AgentResult(reward, rewards, metrics, of_players)
            case _:
                self.status, self.failure = "failed", "has written into the pipe of its process"
                return
        total = reward + sum(rewards.values()) + max(of_players.values(), key=abs, default=0.0)
        if abs(total) <= LARGEST_REWARD:
            self.result, self.status = result, self.episode.limit or "stop"
        else:
            self.status = "failed"
            self.failure = f"gave rewards that add up to {total:g}, beyond {LARGEST_REWARD:g}"
