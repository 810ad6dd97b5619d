"""Rewards are computed in processes of their own: a reward that hangs or crashes costs one completion."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

from trainer.errors import WorkerError
from trainer.isolation.process import GuardedProcess, PrintedText, ProcessDied, end_all
from trainer.plugins import takes_parameter
from trainer.rewards.functions import resolve

LOG = logging.getLogger(__name__)

LOST_LIMITS = 30
"""Failing rewards may take this many times `reward.timeout_s` of each process in one call of `score`."""
_CHUNK = 64
_TRIES = 2
"""A completion whose process dies is retried once: something else may have killed the process."""
_STARTS = 3
"""This many processes in a row may die before they are ready; then the run fails."""
_START_S = 600.0
"""Longest time for the imports of a process."""


@dataclass
class RewardFailures:
    """Completions whose reward could not be computed. Their reward is 0."""

    count: int = 0
    first: str = ""
    skipped: int = 0
    """Completions among them that were not tried, because failed rewards had taken too much time."""

    def add(self, reason: str) -> None:
        self.first = self.first or reason
        self.count += 1

    def lines(self) -> list[str]:
        """Return messages for the user."""
        lines = []
        if self.count:
            lines.append(f"{self.count} rewards failed and count as 0; the first: {self.first}")
        if self.skipped:
            lines.append(
                f"{self.skipped} of them were not tried: failed rewards had already taken {LOST_LIMITS} times "
                "reward.timeout_s for each process"
            )
        return lines


class _Worker(GuardedProcess):
    """One process that computes the reward `name`."""

    def __init__(self, name: str, environment: dict[str, str]):
        super().__init__("trainer.rewards.worker:serve", [name], environment)
        self.ready = False
        self.work: deque[int] = deque()
        """Completions that it has received and not answered, in order."""
        self.since = time.monotonic()
        """When it was started, or when it began with the first completion of `work`."""
        self.replaces_failed = False


class RewardPool:
    """`num_processes` processes that compute the reward `name`. A context manager.

    Args:
        timeout_s: time limit for one completion; after it the process is killed.

    Raises:
        UserError: there is no such reward.
    """

    def __init__(self, name: str, timeout_s: float, num_processes: int):
        self._takes_row = takes_parameter(resolve(name), "row")  # a wrong name fails here, not at the first step
        self._name = name
        self._timeout_s = timeout_s
        self._num_processes = num_processes
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # the cores are for ranks and engines
        self._workers: list[_Worker] = []
        self._bad_starts = 0
        self._printed = PrintedText("reward")

    def __enter__(self) -> RewardPool:
        # The processes import their modules while engines and ranks start.
        self._workers = [_Worker(self._name, self._environment) for _ in range(self._num_processes)]
        return self

    def __exit__(self, *_: object) -> None:
        end_all(self._workers)
        self._workers = []

    def score(
        self, completions: Sequence[str], answers: Sequence[str], rows: Sequence[Mapping[str, Any]] | None = None
    ) -> tuple[list[float], RewardFailures]:
        """Return the rewards in order, and the failures: a reward that raises, hangs or is not a number counts as 0.

        Log the failures, and what reward functions have printed.

        Args:
            rows: the row of the data of each completion, for a reward function with a parameter `row`.

        Raises:
            WorkerError: the processes cannot start.
        """
        given = [completions, answers] if rows is None or not self._takes_row else [completions, answers, rows]
        call = _Call(list(zip(*given, strict=True)))
        self._bad_starts = 0
        size = min(_CHUNK, max(1, -(-len(call.items) // self._num_processes)))
        limit_s = LOST_LIMITS * self._timeout_s * self._num_processes
        try:
            while call.missing and call.lost_s <= limit_s:
                for worker in self._workers:
                    if worker.ready and not worker.work and call.todo:
                        self._give(call, worker, size)
                self._listen(call)
        finally:  # a process that is still busy must not answer the next call
            for worker in [worker for worker in self._workers if worker.work]:
                self._replace(call, worker, failed=False)
            for worker in self._workers:
                self._printed.read(worker)
        rewards, failures = call.rewards()
        for line in [*self._printed.take(), *failures.lines()]:
            LOG.info(line)
        return rewards, failures

    def _give(self, call: _Call, worker: _Worker, size: int) -> None:
        indices = [call.todo.popleft() for _ in range(min(size, len(call.todo)))]
        worker.work.extend(indices)
        worker.since = time.monotonic()
        try:
            worker.send([call.items[i] for i in indices])
        except ProcessDied:
            self._replace(call, worker, failed=False)

    def _listen(self, call: _Call) -> None:
        """Wait for messages, output, or the next time limit, and handle them."""
        begin = time.monotonic()
        patience = max(0.0, min(self._deadline(worker) for worker in self._workers) - begin)
        heard = set(wait([end for worker in self._workers for end in (worker.pipe, worker.output)], patience))
        stopped = time.monotonic() > begin + patience + 1  # perhaps the whole job was stopped: restart the clocks
        for worker in list(self._workers):
            if stopped:
                worker.since = time.monotonic()
            if worker.output in heard:
                self._printed.read(worker)
            if worker.pipe in heard:
                self._hear(call, worker)
            elif (
                time.monotonic() > self._deadline(worker) and not worker.pipe.poll()
            ):  # no message arrived in the meantime
                if not worker.ready:
                    raise WorkerError(f"a process of reward.name={self._name} has not started after {_START_S:g} s")
                call.fail(worker.work.popleft(), f"took longer than reward.timeout_s={self._timeout_s:g}")
                self._replace(call, worker, failed=True)

    def _deadline(self, worker: _Worker) -> float:
        if not worker.ready:
            return worker.since + _START_S
        return worker.since + self._timeout_s if worker.work else float("inf")

    def _hear(self, call: _Call, worker: _Worker) -> None:
        try:
            match worker.receive():
                case [float() | str() as result, bool() as last] if worker.work:
                    self._answer(call, worker, result, last)
                case {"ready": True}:
                    if worker.replaces_failed:
                        call.lost_s += time.monotonic() - worker.since
                    worker.ready, self._bad_starts = True, 0
                case {"cannot_start": str() as reason}:
                    raise WorkerError(f"the processes of reward.name={self._name} die as they start: {reason}")
                case _:  # user code wrote into the pipe
                    raise ProcessDied
        except ProcessDied:
            self._bury(call, worker)

    def _answer(self, call: _Call, worker: _Worker, result: float | str, last: bool) -> None:
        """Take the result of the worker's first completion. `last`: the process will not answer again."""
        index, now = worker.work.popleft(), time.monotonic()
        if isinstance(result, str):
            call.lost_s += now - worker.since
            call.fail(index, result)
        else:
            call.results[index] = result
        worker.since = now
        if last:
            self._replace(call, worker, failed=isinstance(result, str))

    def _bury(self, call: _Call, worker: _Worker) -> None:
        """Handle the death of a process. Its first completion is the suspect; without one, the start has failed."""
        index = worker.work[0] if worker.work else None
        failed = index is not None
        ending = self._replace(call, worker, failed, died=True)
        if failed:
            call.deaths[index] += 1
            if call.deaths[index] >= _TRIES:
                call.todo.remove(index)
                call.fail(index, f"ended its process ({ending})")
        elif not worker.ready:
            self._bad_starts += 1
            if self._bad_starts >= _STARTS:
                printed = self._printed.last_line()
                output = f"; the last output: {printed}" if printed else ""
                raise WorkerError(f"the processes of reward.name={self._name} die as they start ({ending}){output}")

    def _replace(self, call: _Call, worker: _Worker, failed: bool, died: bool = False) -> str:
        """Replace a process by a new one, and queue its completions again. Return how the process ended."""
        if failed:
            call.lost_s += time.monotonic() - worker.since
        call.todo.extendleft(reversed(worker.work))
        worker.work.clear()
        ending = worker.end(died)
        self._printed.read(worker)
        worker.close()
        new = _Worker(self._name, self._environment)
        new.replaces_failed = failed
        self._workers[self._workers.index(worker)] = new
        return ending


class _Call:
    """The state of one call of `RewardPool.score`."""

    def __init__(self, items: list[tuple]):
        self.items = items
        self.todo = deque(range(len(items)))
        self.results: dict[int, float | str] = {}
        self.deaths: Counter[int] = Counter()
        self.lost_s = 0.0
        """Time of the processes that went into failed completions."""

    @property
    def missing(self) -> bool:
        return len(self.results) < len(self.items)

    def fail(self, index: int, reason: str) -> None:
        self.results[index] = reason

    def rewards(self) -> tuple[list[float], RewardFailures]:
        failures = RewardFailures(skipped=len(self.items) - len(self.results))
        for index in range(len(self.items)):
            result = self.results.get(index, "was not tried")
            if isinstance(result, str):
                failures.add(result)
                self.results[index] = 0.0
        return [float(self.results[index]) for index in range(len(self.items))], failures
