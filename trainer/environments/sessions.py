"""Environments in their own processes: one that hangs, raises or crashes costs at most its episode.

A lost environment is made again in another process, and gets the same replies. If it fails in the same call again, its
episode has failed.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.config import EnvironmentConfig
from trainer.environments.base import Message, StepResult
from trainer.environments.worker import largest_message
from trainer.sandbox.limits import LARGEST_REWARD, MAX_ASYNC_SESSIONS
from trainer.sandbox.pool import NOT_TRIED, WorkerPool
from trainer.sandbox.process import ProcessDied
from trainer.sandbox.tasks import Task

LOG = logging.getLogger(__name__)

_NUMBERS = itertools.count()


class Session(Task):
    """The environment of one episode on the driver: the calls and the answers so far."""

    is_session = True
    retried = frozenset({"died", "timeout", "raised"})

    def __init__(self, row: Mapping[str, Any], seed: int):
        super().__init__()
        self.row = row
        self.seed = seed
        self.replies: list[Message] = []
        """The replies of the policy. The pool passes them to the environment."""
        self.steps: list[StepResult] = []
        """The answers of the environment: the first messages, then a step for each reply."""
        self.ended = False
        """The episode needs no more steps. The pool closes the environment."""
        self.status = ""
        """Why the episode has ended: `timeout` or `failed` if the environment has failed."""
        self.failure = ""
        """Why the environment has failed."""
        self.is_spared = False
        """The policy cannot have caused the failure."""
        self.answered = 0
        """Calls that the present environment has answered. It begins again at 0 when the environment is lost."""
        self._number = next(_NUMBERS)
        """Its name in messages to the process."""

    @property
    def is_async(self) -> bool:  # type: ignore[override]
        return self.worker is not None and self.worker.is_concurrent

    @property
    def method(self) -> str:
        """The method that is called next; empty if there is nothing to do."""
        if self.ended:
            return "close" if self.worker is not None else ""
        if self.answered > len(self.replies):
            return ""
        return "step" if self.answered else "reset"

    @property
    def label(self) -> str:
        return self.method or super().label

    def next_call(self) -> list[Any] | None:
        given = {"reset": [self.row, self.seed], "step": self.replies[self.answered - 1 : self.answered]}
        return [self._number, self.method, *given.get(self.method, [])] if self.method else None

    def take(self, value: Any) -> bool:
        """Take an answer. One that was given before must be the same."""
        if self.ended:
            self.worker = None
            return False
        match value:
            case {
                "messages": list(messages),
                "reward": float(reward),
                "done": bool(done),
                "rewards": dict(rewards),
                "metrics": dict(metrics),
            }:
                step = StepResult(messages, reward, done, rewards, metrics)
            case _:
                raise ProcessDied
        if self.answered == len(self.steps):
            self.steps.append(step)
        elif step != self.steps[self.answered]:
            self.fail(
                "failed",
                "answered the same replies in another way when they were repeated; an environment must be a function "
                "of row, seed and replies",
                by_policy=False,
            )
        if not abs(self.reward) <= LARGEST_REWARD:
            self.fail("failed", f"gave rewards that add up to {self.reward:g}, beyond {LARGEST_REWARD:g}")
        self.answered += 1
        if not self.method:
            self.run_isolated = False
        return False

    @property
    def reward(self) -> float:
        """Of all steps, with their named terms."""
        return sum(step.reward for step in self.steps) + sum(self.total("rewards").values())

    def total(self, field: str) -> dict[str, float]:
        """Return the sums over the steps of their `rewards` or `metrics`, by name."""
        totals: Counter[str] = Counter()
        for step in self.steps:
            for name, value in getattr(step, field).items():
                totals[name] += value
        return dict(totals)

    def restart(self) -> None:
        self.answered = 0

    def record_failure(self, status: str, reason: str) -> None:
        reason = reason if self.worker is None else f"{self.method} {reason}"
        if self.ended:
            LOG.info("an environment was not closed: %s", reason)
            self.worker = None
        else:
            super().record_failure(status, reason)

    def fail(self, status: str, reason: str, by_policy: bool = True) -> None:
        """End the episode. `by_policy`: a reply may have caused the failure, if there was one."""
        if not self.ended:
            self.status, self.failure, self.ended = "timeout" if status == "timeout" else "failed", reason, True
            self.is_spared = not (by_policy and self.replies) or reason.startswith(NOT_TRIED)


class EnvironmentPool(WorkerPool):
    """`environment.num_processes` processes that run environments. A context manager.

    Args:
        most_characters: the contents of an answer are cut behind this number of characters.
    """

    def __init__(self, config: EnvironmentConfig, most_characters: int):
        super().__init__(
            "trainer.environments.worker:EnvironmentHandler",
            [config.name, dict(config.kwargs), config.timeout_s, most_characters],
            config.num_processes,
            role="environment",
            name=f"environment.name={config.name}",
            limit=("environment.timeout_s", config.timeout_s),
            concurrency=MAX_ASYNC_SESSIONS,
            largest_message=largest_message(most_characters),
            python=config.python,
        )

    def step_all(self, sessions: Sequence[Session]) -> None:
        """Make the calls that the sessions need: afterwards each has answered its replies, has failed, or is closed.

        Raises:
            WorkerError: the processes cannot start.
        """
        with self.round() as tasks:
            tasks.submit(sessions)
            tasks.wait()
