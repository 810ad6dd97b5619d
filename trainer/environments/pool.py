"""Environments run in processes of their own: one that hangs, raises or crashes costs no more than its episode.

An environment that is lost is made again in a new process, and gets the same replies. If it fails in the same call
again, its episode has failed.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from typing import Any

from trainer.config import EnvironmentConfig
from trainer.environments.base import Message, Step
from trainer.environments.worker import BEGUN, largest_message
from trainer.errors import WorkerError
from trainer.process.failure_log import record_replaced_process
from trainer.process.signals import SIGNALS
from trainer.rewards.parsing import LARGEST
from trainer.sandbox.process import GuardedProcess, OutputCapture, ProcessDied, end_all

LOG = logging.getLogger(__name__)

_MAX_ATTEMPTS = 2
"""So often may calls of one environment fail; then its episode has failed."""
LOST_LIMITS = 30
"""Failing calls may take this many times `environment.timeout_s` of each process in one round."""
_STARTS = 3
"""This many processes in a row may die before they are ready; then the run fails."""
_START_S = 600.0
"""Longest time for the imports of a process."""
_GRACE_S = 1.0
"""A process stops a call that is `async` by itself. After this time the pool ends the process instead."""
_MOST_CALLS = 256
"""So many `async` calls may be under way in one process."""


class Session:
    """The environment of one episode, as the driver sees it: what it was told, and what it has answered."""

    def __init__(self, row: Mapping[str, Any], seed: int):
        self.row = row
        self.seed = seed
        self.replies: list[Message] = []
        """What the policy said. The pool tells it to the environment."""
        self.steps: list[Step] = []
        """What the environment has answered: the first messages, then a step for each reply."""
        self.ended = False
        """The episode needs no more steps. The pool closes the environment."""
        self.status = ""
        """`timeout` or `failed`, if the environment has failed."""
        self.failure = ""
        """The reason."""
        # For the pool.
        self.host: _Host | None = None
        self.number = 0
        """Its name in messages to the process."""
        self.answered = 0
        """Calls that the present environment has answered. It begins again at 0 when the environment is lost."""
        self.tries = 0
        self.alone = False
        """A process died while several of its calls were under way, one of them of this session."""

    def call(self) -> tuple[Any, ...] | None:
        """Return the next call that its environment needs: method and arguments. None: there is nothing to do."""
        if self.ended:
            return ("close",) if self.host is not None else None
        if self.answered > len(self.replies):
            return None
        return ("step", self.replies[self.answered - 1]) if self.answered else ("start", self.row, self.seed)

    def take(self, step: Step) -> None:
        """Take an answer. One that was given before must be the same."""
        if self.answered == len(self.steps):
            self.steps.append(step)
        elif step != self.steps[self.answered]:
            self.fail(
                "failed",
                "answered the same replies in another way when they were repeated; an environment must be a function "
                "of row, seed and replies",
            )
        if not abs(self.reward) <= LARGEST:
            self.fail("failed", f"gave rewards that add up to {self.reward:g}, beyond {LARGEST:g}")
        self.answered += 1
        if self.call() is None:
            self.alone = False

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

    def blame(self, status: str, reason: str) -> None:
        """Note that a call of it has failed: it is made again, or has failed for good."""
        self.tries += 1
        self.answered = 0
        if self.tries >= _MAX_ATTEMPTS:
            self.fail(status, reason)

    def fail(self, status: str, reason: str) -> None:
        if not self.ended:
            self.status, self.failure, self.ended = status, reason, True


class _Host(GuardedProcess):
    """One process that runs environments."""

    def __init__(self, config: EnvironmentConfig, most_characters: int):
        # The cores are for ranks and engines.
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        arguments = [config.name, dict(config.options), config.timeout_s, most_characters]
        super().__init__("trainer.environments.worker:serve", arguments, environment)
        self.ready = self.concurrent = False
        self.sessions: dict[int, Session] = {}
        self.queue: deque[Session] = deque()
        """Sessions whose next calls it is to make, in their order."""
        self.calls: dict[int, float | None] = {}
        """Sessions whose calls it has not answered, and when each call began; None: it has not begun."""
        self.since = time.monotonic()
        """When it was started, or heard of last."""
        self.looked = self.since
        """When it was started, or when it was last seen not to be stopped while it started."""

    def takes_call(self, session: Session) -> bool:
        """Whether the next call of the session can be sent now.

        A process whose methods are not `async` gets one call at a time. Any other gets the next call when the last one
        has begun, so that the pipe never fills.
        """
        if not self.ready:
            return False
        if not self.concurrent or session.alone or any(self.sessions[number].alone for number in self.calls):
            return not self.calls
        return len(self.calls) < _MOST_CALLS and None not in self.calls.values()

    def deadline(self, timeout_s: float) -> float:
        if not self.ready:
            return min(self.since + _START_S, self.looked + timeout_s)
        if not self.calls:
            return float("inf")
        begun = [since for since in self.calls.values() if since is not None]
        return min(begun, default=self.since) + timeout_s + (_GRACE_S if self.concurrent else 0.0)


class EnvironmentPool:
    """`environment.num_processes` processes that run environments. A context manager.

    Args:
        most_characters: the contents of an answer are cut behind this number of characters.
    """

    def __init__(self, config: EnvironmentConfig, most_characters: int):
        self._config = config
        self._most_characters = most_characters
        self._hosts: list[_Host] = []
        self._bad_starts = 0
        self._lost_s = 0.0
        """Time of the processes that went into calls that failed, in this round."""
        self._number = 0
        self._printed = OutputCapture("environment")

    def __enter__(self) -> EnvironmentPool:
        # The processes import their modules while engines and ranks start.
        self._hosts = [_Host(self._config, self._most_characters) for _ in range(self._config.num_processes)]
        return self

    def __exit__(self, *_: object) -> None:
        end_all(self._hosts)
        self._hosts = []

    def advance(self, sessions: Sequence[Session]) -> None:
        """Make the calls that the sessions need: afterwards each has answered its replies, has failed, or is closed.

        Raises:
            WorkerError: the processes cannot start.
        """
        self._bad_starts, self._lost_s = 0, 0.0
        limit_s = LOST_LIMITS * self._config.timeout_s * len(self._hosts)
        for session in sessions:
            self._queue(session)
        while any(host.queue or host.calls for host in self._hosts):
            if self._lost_s > limit_s:
                self._give_up()
            for host in list(self._hosts):
                self._give(host)
            self._listen()
        for host in self._hosts:
            self._printed.read(host)
        for line in self._printed.take():
            LOG.info(line)

    def _queue(self, session: Session) -> None:
        """Let a process make the next call of the session, if it needs one."""
        if session.call() is None:
            return
        if session.host is None:
            self._number += 1
            session.host, session.number = min(self._hosts, key=lambda host: len(host.sessions)), self._number
            session.host.sessions[session.number] = session
        session.host.queue.append(session)

    def _give_up(self) -> None:
        """Let all sessions fail whose calls have not been sent."""
        reason = f"failed calls had already taken {LOST_LIMITS} times environment.timeout_s for each process"
        for session in [session for host in self._hosts for session in host.queue]:
            session.fail("timeout", f"was not tried: {reason}")

    def _give(self, host: _Host) -> None:
        while host.queue and host.takes_call(host.queue[0]):
            session = host.queue.popleft()
            host.calls[session.number], host.since = None, time.monotonic()
            try:
                host.send([session.number, *(session.call() or ())])
            except ProcessDied:
                self._lose(host, "failed", died=True)
                return

    def _listen(self) -> None:
        """Wait for messages, output, or the next time limit, and handle them."""
        begin, timeout_s = time.monotonic(), self._config.timeout_s
        patience = max(0.0, min(host.deadline(timeout_s) for host in self._hosts) - begin)
        ends = [end for host in self._hosts for end in (host.pipe, host.output)]
        with SIGNALS.waiting():
            heard = set(wait(ends, None if patience == float("inf") else patience))
        stopped = time.monotonic() > begin + patience + 1  # perhaps the whole job was stopped: restart the clocks
        for host in list(self._hosts):
            if stopped:
                host.since = host.looked = time.monotonic()
                host.calls = {n: None if since is None else host.since for n, since in host.calls.items()}
            if host.output in heard:
                self._printed.read(host)
            if host.pipe in heard:
                self._hear(host)
            elif time.monotonic() > host.deadline(timeout_s) and not host.pipe.poll():
                if host.ready:
                    self._lose(host, "timeout", f"took longer than environment.timeout_s={timeout_s:g}")
                else:
                    self._check_start(host)

    def _check_start(self, host: _Host) -> None:
        """Replace a process that somebody has stopped while it started."""
        host.looked = time.monotonic()
        if host.is_stopped:
            self._lose(host, "failed")
            record_replaced_process("environment", "stopped by a signal", host.looked - host.since)
        elif host.looked > host.since + _START_S:
            raise WorkerError(f"a process of environment.name={self._config.name} has not started after {_START_S:g} s")

    def _hear(self, host: _Host) -> None:
        try:
            answer = host.receive(largest_message(self._most_characters))
            host.since = time.monotonic()
            match answer:
                case [int(number), str(begun)] if begun == BEGUN and number in host.calls:
                    host.calls[number] = host.since
                case [int(number), dict(result)] if number in host.calls:
                    self._answer(host, number, result)
                case {"ready": True, "concurrent": bool(concurrent)}:
                    host.ready, host.concurrent, self._bad_starts = True, concurrent, 0
                case {"cannot_start": str(reason)}:
                    raise WorkerError(
                        f"the processes of environment.name={self._config.name} die as they start: {reason}"
                    )
                case _:  # user code wrote into the pipe
                    raise ProcessDied
        except ProcessDied:
            self._lose(host, "failed", died=True)

    def _answer(self, host: _Host, number: int, result: dict[str, Any]) -> None:
        session = host.sessions[number]
        closing = session.ended
        if "failed" in result:
            self._lost_s += (host.since - (host.calls[number] or host.since)) / len(host.calls)
        del host.calls[number]
        if closing:
            del host.sessions[number]
            session.host = None
        match result:
            case {"failed": str(reason), "timeout": bool(late)}:
                if closing:
                    LOG.info("an environment was not closed: %s", reason)
                else:
                    session.blame("timeout" if late else "failed", reason)
            case {
                "messages": list(messages),
                "reward": float(reward),
                "done": bool(done),
                "rewards": dict(rewards),
                "metrics": dict(metrics),
            } if not closing:
                session.take(Step(messages, reward, done, rewards, metrics))
        self._queue(session)

    def _lose(self, host: _Host, status: str, reason: str = "", died: bool = False) -> None:
        """Replace a process that has died, or that is to end. Its environments are made again in another.

        If one call was under way, it is to blame. If several were, each is repeated alone: that shows which one it is.
        """
        under_way = [number for number, since in host.calls.items() if since is not None] or list(host.calls)
        suspects = [host.sessions[number] for number in under_way]
        cost_s = max((time.monotonic() - since for since in host.calls.values() if since is not None), default=0.0)
        self._lost_s += cost_s
        sessions, host.sessions, host.calls = list(host.sessions.values()), {}, {}
        ending = host.end(died)
        if died:
            record_replaced_process("environment", ending, cost_s)
        self._printed.read(host)
        host.close()
        self._hosts[self._hosts.index(host)] = _Host(self._config, self._most_characters)
        if not host.ready:
            self._bad_starts += 1
            if self._bad_starts >= _STARTS:
                printed = self._printed.last_line()
                output = f"; the last output: {printed}" if printed else ""
                name = self._config.name
                raise WorkerError(f"the processes of environment.name={name} die as they start ({ending}){output}")
        for session in sessions:
            session.host, session.answered = None, 0
        if len(suspects) == 1:
            suspects[0].blame(status, reason or f"ended its process ({ending})")
        for session in suspects if len(suspects) > 1 else []:
            session.alone = True
        for session in sessions:
            self._queue(session)
