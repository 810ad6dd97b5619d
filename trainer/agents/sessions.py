"""Agents in their own processes: one that hangs, raises or crashes costs at most its episode."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable
from typing import Any

from trainer.agents.episode import AgentEpisode
from trainer.config import EnvironmentConfig
from trainer.environments.agent import AgentResult, Endpoint
from trainer.environments.episode_runner import RolloutRequest
from trainer.sandbox.limits import CANCEL_S, LARGEST_REWARD, MAX_ASYNC_SESSIONS, MAX_ATTEMPTS
from trainer.sandbox.pool import WorkerPool
from trainer.sandbox.process import ProcessDied
from trainer.sandbox.tasks import Task

_NUMBERS = itertools.count()


class AgentSession(Task):
    """The agent of one episode on the driver. One that fails runs again from the start, at a new address.

    All methods but the constructor and `cancellation` run on the thread of the pool.

    Args:
        timeout_s: see `AgentRunner`.
        begin: returns a new episode of the endpoint.
        end: ends one.
        clock: returns the time, for `began_at`.
    """

    is_session = True
    is_async = True
    retried = frozenset({"died", "timeout", "raised"})
    limit = ("environment.timeout_s", math.inf)  # the time of the policy must not count (see `AgentRunner`)

    def __init__(
        self,
        request: RolloutRequest,
        seed: int,
        timeout_s: float,
        begin: Callable[[RolloutRequest], AgentEpisode],
        end: Callable[[AgentEpisode], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        super().__init__()
        self.request = request
        self.result: AgentResult | None = None
        """None: the agent has failed."""
        self.status = self.failure = ""
        """Why the episode has ended: `timeout` or `failed` if the agent has failed. And the reason."""
        self.error = ""
        """What the agent has raised after a limit. Then it has not failed, but has no reward."""
        self.attempt = -1
        """Number of the present attempt, in messages to the process."""
        self.began_at: float | None = None
        """When the present attempt was sent to the process."""
        self.first_began_at: float | None = None
        """When the first one was."""
        self._cancelled = -1  # the attempt that is to end
        self._late = ""  # why the present attempt is to end
        self._was_late = False
        self.timeout_s = timeout_s
        self._seed, self._too_slow = seed, f"took longer than environment.timeout_s={timeout_s:g}"
        self._begin, self._end, self.clock = begin, end, clock
        self._is_over = False
        self.restart()

    @property
    def label(self) -> str:
        return "agent"

    def next_call(self) -> list[Any] | None:
        if self._is_over:
            return None
        if self.worker is not None:  # it is sent now
            self._was_late = False
            self.began_at = self.clock()
            if self.first_began_at is None:
                self.first_began_at = self.began_at
            self.episode.start_clock()
        rules, url = self.episode.rules, self.episode.base_url
        endpoint = dataclasses.asdict(Endpoint(url, self.episode.secret, rules.model))
        return [self.attempt, "run", self.request.prompt.row, self._seed, endpoint]

    def take(self, value: Any) -> bool:
        match value:
            case {"reward": float(reward), "rewards": dict(rewards), "metrics": dict(metrics)}:
                result = AgentResult(reward, rewards, metrics)
            case _:
                raise ProcessDied
        total = reward + sum(rewards.values())
        if not abs(total) <= LARGEST_REWARD:
            self.fail("failed", f"gave rewards that add up to {total:g}, beyond {LARGEST_REWARD:g}")
            return True
        self.result = result
        self._over(self.episode.limit or "stop")
        return False

    def record_failure(self, status: str, reason: str) -> None:
        if self._was_late:  # its process had to be ended, and `restart` has begun a new attempt
            return
        if self._late:
            self.restart()
        elif status == "raised" and self.episode.limit:  # it does not know what to do without the reply
            self.result, self.error = AgentResult(), reason
            self._over(self.episode.limit)
        else:
            super().record_failure(status, f"run {self._too_slow if status == 'timeout' else reason}")

    def restart(self) -> None:
        """Begin a new attempt."""
        if self._is_over:
            return
        if self.attempt >= 0:
            self._end(self.episode)
        if self._late and self.failures >= MAX_ATTEMPTS:
            self.fail("timeout", f"run {self._late}")
            return
        self._was_late, self._late = bool(self._late), ""
        self.attempt, self.began_at = next(_NUMBERS), None
        self.episode = self._begin(self.request)

    def cancellation(self, reason: str = "", is_last: bool = False) -> Cancellation | None:
        """Return a task that ends the present attempt; None: there was one, or the agent has ended.

        Args:
            reason: why; empty: it has taken longer than `environment.timeout_s`.
            is_last: the agent does not get another attempt.
        """
        attempt = self.attempt
        if self._is_over or attempt == self._cancelled:
            return None
        self._cancelled = attempt
        return Cancellation(self, attempt, reason, is_last)

    def note_late(self, reason: str, is_last: bool) -> None:
        """Note that the present attempt takes too long. `is_last`: there is no other attempt."""
        self._late = reason or self._too_slow
        self.failures += MAX_ATTEMPTS if is_last else 1

    def fail(self, status: str, reason: str) -> None:
        if not self._is_over:
            self.failure = reason
            self._over("timeout" if status == "timeout" else "failed")

    def rest(self) -> None:
        if self._is_over:
            super().rest()

    def _over(self, status: str) -> None:
        self._is_over, self.status, self.worker = True, status, None


class Cancellation(Task):
    """Ends an attempt of an agent in its process. If the attempt goes on, the process is replaced."""

    is_session = True
    is_async = True
    is_urgent = True

    def __init__(self, session: AgentSession, attempt: int, reason: str, is_last: bool):
        super().__init__()
        self.limit = ("environment.timeout_s", session.timeout_s + CANCEL_S)
        self._session = session
        self._attempt: int | None = attempt
        self._late: tuple[str, bool] | None = (reason, is_last)

    def next_call(self) -> list[Any] | None:
        session = self._session
        if self._attempt != session.attempt or session.worker is None:
            return None  # it has ended
        if self._late is not None:
            session.note_late(*self._late)
            self._late = None
        self.worker = session.worker
        return [self._attempt, "cancel"]

    def take(self, value: Any) -> bool:
        self._attempt = self.worker = None
        return False

    def fail(self, status: str, reason: str) -> None:
        self._attempt = self.worker = None


class AgentPool(WorkerPool):
    """`environment.num_processes` processes that run agents. A context manager."""

    def __init__(self, config: EnvironmentConfig):
        super().__init__(
            "trainer.agents.worker:AgentHandler",
            [config.name, dict(config.kwargs)],
            config.num_processes,
            role="environment",
            name=f"environment.name={config.name}",
            limit=("environment.timeout_s", config.timeout_s),
            concurrency=2 * MAX_ASYNC_SESSIONS,  # and their cancellations
            python=config.python,
        )
