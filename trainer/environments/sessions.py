"""Environments in their own processes: one that hangs, raises or crashes costs at most its episode.

A lost environment is made again in another process, and gets the same replies. If it fails in the same call again, its
episode has failed.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import xxhash

from trainer.config import EnvironmentConfig
from trainer.environments.base import Message, StepResult
from trainer.environments.worker import largest_message
from trainer.sandbox.limits import LARGEST_REWARD, MAX_ASYNC_SESSIONS, MAX_ATTEMPTS
from trainer.sandbox.pool import Call, CallFailed, CallLost, Calls, WorkerPool

LOG = logging.getLogger(__name__)

_NUMBERS = itertools.count()


class Session:
    """The environment of one episode on the driver: the calls and the answers so far.

    Args:
        key: names the episode, also after a kill: the ids of its steps are digests of it and of the replies.
        recorded: returns what the journal has as the answer to a call, by its number, and as the state of the
            environment after it; None: no answer.
    """

    most_attempts = MAX_ATTEMPTS

    def __init__(
        self,
        row: Mapping[str, Any],
        seed: int,
        key: str = "",
        recorded: Callable[[int], tuple[StepResult, str | None] | None] = lambda number: None,
    ):
        self.row = row
        self.seed = seed
        self.state: str | None = None
        """What the environment has saved after the last step, if it can save itself."""
        self._key = key
        self._step_ids: list[str] = []
        self._recorded = recorded
        self.replies: list[Message] = []
        """The replies of the policy."""
        self.steps: list[StepResult] = []
        """The answers of the environment: the first messages, then a step for each reply."""
        self.ended = False
        """The episode needs no more steps."""
        self.status = ""
        """Why the episode has ended: `timeout` or `failed` if the environment has failed."""
        self.failure = ""
        """Why the environment has failed."""
        self.is_spared = False
        """The policy cannot have caused the failure."""
        self.failures = 0
        """Calls that have failed."""
        self.worker: Any = None
        """The process that has the environment."""
        self._answered = 0  # calls that the present environment has answered, or the one whose state is loaded
        self._is_stored = True  # it is not made: its recorded answers are enough so far, and its state
        self._number = next(_NUMBERS)  # its name in messages to the process

    async def answer(self, calls: Calls) -> None:
        """Let the environment answer all replies: it has done so then, or has failed.

        Raises:
            WorkerError: the processes cannot start.
        """
        is_alone = False
        while not self.ended and self._answered <= len(self.replies):
            answer, state = self._recorded(self._answered) or (None, None)
            if answer is not None and (answer.done or self._is_stored and state is not None):
                self._accept(answer, state)  # after the last answer, the environment is not needed
                self._answered += 1
                continue
            method, given = self._next_call(answer)
            call = self._call(method, given, is_alone)
            try:
                value = await calls.ask(call)
            except asyncio.CancelledError:
                self.worker = call.worker  # it may have the environment, which `close` ends there
                raise
            except CallLost as lost:
                is_alone, self.worker = is_alone or lost.is_suspect, None
                self._lose()
            except CallFailed as failed:
                self.worker = None if failed.status == "died" else call.worker
                self._lose()
                self.failures += 1
                if self.failures >= self.most_attempts:
                    self.fail(failed.status, f"{method} {failed.reason}")
            else:
                self.worker, self._is_stored = call.worker, False
                if method != "load":
                    self._take(value)

    def _next_call(self, recorded: StepResult | None) -> tuple[str, list[Any]]:
        """Return the next call of the present environment. A new one loads what the one before has saved."""
        if self._is_stored and self.state is not None:
            return "load", [self.state]
        if not self._answered:
            return "reset", [self.row, self.seed, self._step_id(0)]
        known = self.steps[self._answered] if self._answered < len(self.steps) else recorded
        given = None if known is None else vars(known)
        return "step", [self.replies[self._answered - 1], self._step_id(self._answered), given]

    def _lose(self) -> None:
        """A new environment must take the place of the present one."""
        self._is_stored = self.state is not None
        self._answered = len(self.steps) if self._is_stored else 0

    def _step_id(self, number: int) -> str:
        """Return the id of a call: the same for the same episode and replies, in any process."""
        while len(self._step_ids) <= number:
            before = [self._step_ids[-1], self.replies[len(self._step_ids) - 1]] if self._step_ids else [self._key]
            self._step_ids.append(xxhash.xxh3_128_hexdigest(json.dumps(before).encode()))
        return self._step_ids[number]

    async def close(self, calls: Calls) -> None:
        """Close the environment."""
        if self.worker is None:
            return
        call = self._call("close", [])
        self.worker = None
        try:
            await calls.ask(call)
        except CallLost:
            pass
        except CallFailed as failed:
            LOG.info("an environment was not closed: close %s", failed.reason)

    def _call(self, method: str, given: list[Any], is_alone: bool = False) -> Call:
        ends = method == "close"
        message = [self._number, method, *given]
        return Call(message, method, is_alone=is_alone, is_session=True, ends_session=ends, worker=self.worker)

    def _take(self, value: Any) -> None:
        """Take an answer. One that was given before must be the same."""
        match value:
            case {
                "messages": list(messages),
                "reward": float(reward),
                "done": bool(done),
                "rewards": dict(rewards),
                "metrics": dict(metrics),
                "player": str(player),
                "player_rewards": dict(player_rewards),
                "state": str() | None as state,
            }:
                step = StepResult(messages, reward, done, rewards, metrics, player, player_rewards)
            case _:
                self.fail("failed", "has written into the pipe of its process")
                return
        if self._answered == len(self.steps):
            self._accept(step, state)
        elif step != self.steps[self._answered]:
            self.fail(
                "failed",
                "answered the same replies in another way when they were repeated; an environment must be a function "
                "of row, seed and replies",
                by_policy=False,
            )
        self._answered += 1

    def _accept(self, step: StepResult, state: str | None) -> None:
        """Add an answer that was not given before."""
        self.steps.append(step)
        self.state = state
        for reward in (self.reward_of(player) for player in {one.player for one in self.steps if not one.done}):
            if not abs(reward) <= LARGEST_REWARD:
                self.fail("failed", f"gave rewards that add up to {reward:g}, beyond {LARGEST_REWARD:g}")

    def reward_of(self, player: str) -> float:
        """Return what the steps gave a player for its replies, with their named terms, and beyond that."""
        own = [step for before, step in itertools.pairwise(self.steps) if before.player == player]
        more = sum(step.player_rewards.get(player, 0.0) for step in self.steps)
        return sum((step.reward for step in own), 0.0) + sum(self.total("rewards", own).values()) + more

    def total(self, field: str, steps: Sequence[StepResult] | None = None) -> dict[str, float]:
        """Return the sums over steps of their `rewards` or `metrics`, by name. None: over all."""
        totals: Counter[str] = Counter()
        for step in self.steps if steps is None else steps:
            for name, value in getattr(step, field).items():
                totals[name] += value
        return dict(totals)

    def fail(self, status: str, reason: str, by_policy: bool = True) -> None:
        """End the episode. `by_policy`: a reply may have caused the failure, if there was one."""
        if not self.ended:
            self.status, self.failure, self.ended = "timeout" if status == "timeout" else "failed", reason, True
            self.is_spared = not (by_policy and self.replies)


class EnvironmentPool(WorkerPool):
    """`environment.num_processes` processes that run environments or agents. A context manager.

    Args:
        most_characters: the contents of an answer of an environment are cut behind this number of characters.
    """

    def __init__(self, config: EnvironmentConfig, most_characters: int = 0):
        super().__init__(
            "trainer.environments.worker:EnvironmentHandler",
            [config.name, dict(config.kwargs), config.timeout_s, most_characters],
            config.num_processes,
            role="environment",
            name=f"environment.name={config.name}",
            limit=("environment.timeout_s", config.timeout_s),
            concurrency=MAX_ASYNC_SESSIONS,
            largest_message=largest_message(most_characters),
        )
