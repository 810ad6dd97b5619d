"""Rewards of completions that arrive one after another: the calls to make, and their state while they are made."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import os
import queue
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Self

from trainer.config import RewardConfig
from trainer.process.signals import SIGNALS
from trainer.rewards.cache import Result
from trainer.rewards.scores import NOT_TRIED, Scores
from trainer.rewards.terms import Call, RewardFunction, RewardInput

if TYPE_CHECKING:
    from trainer.rewards.pool import RewardPool

_MAX_ATTEMPTS = 2
"""A completion whose process dies is retried once: something else may have killed the process."""


class ScoringSession:
    """Rewards of completions that arrive one after another (see `RewardPool.judging`)."""

    def __init__(self, pool: RewardPool, state: State, computing: Future[None], n: int, step: str):
        self._pool = pool
        self._state = state
        self._computing = computing
        self._n = n
        self._step = step
        self._calls: dict[RewardFunction, list[Call]] = {component: [] for component in pool.components}
        self._tasks: list[Task] = []
        self._known: dict[str, Result] = {}
        self._asked: set[str] = set()
        self._total = 0

    def add(self, first: int, attempts: Sequence[RewardInput]) -> None:
        """Begin to compute the rewards of completions at the places from `first` on: whole groups, one after another.

        Raises:
            WorkerError: the processes cannot start.
        """
        if self._computing.done():
            self._computing.result()  # raises if it has failed
        self._total += len(attempts)
        tasks = []
        for component, calls in self._calls.items():
            group = component.calls(attempts, self._n, first)
            calls += group
            new = [call for call in group if self._is_new(call)]
            tasks += [Task(component, new[i : i + component.batch]) for i in range(0, len(new), component.batch)]
        self._tasks += tasks
        self._state.send(tasks)

    def _is_new(self, call: Call) -> bool:
        """Whether the call must be made: its result is not stored, and no earlier call is the same."""
        if call.key is None:
            return True
        if call.key in self._asked:
            return False
        self._asked.add(call.key)
        result = self._pool.find(call.key, self._step)
        if result is not None:
            self._known[call.key] = result
        return result is None

    def results(self) -> dict[RewardFunction, dict[Call, Result]]:
        """Wait for the result of each call of each reward. No completions can follow."""
        self._state.close()
        with SIGNALS.waiting():
            while not self._computing.done():  # not in one wait, which signals could not interrupt
                concurrent.futures.wait([self._computing], 0.5)
        self._computing.result()
        made: dict[Call, Result] = {}
        for task, results in self._state.results_of(self._tasks):
            made |= zip(task.calls, results, strict=True)
        known = self._known | {call.key: result for call, result in made.items() if call.key}
        return {
            component: {
                call: known[call.key] if call.key else made[call]
                for call in sorted(calls, key=lambda call: call.indices)
            }
            for component, calls in self._calls.items()
        }

    def scores(self) -> Scores:
        """Wait for the rewards of all completions. One that raises, hangs or is no number has failed.

        Raises:
            UserError: more than `reward.max_error_rate` of the rewards have failed.
            WorkerError: the processes cannot start.
        """
        return self._pool.finish(self.results(), self._total, self._step)


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
    """Calls of one reward that a process makes in one go."""

    component: RewardFunction
    calls: list[Call]

    def message(self, components: list[RewardFunction]) -> list[Any]:
        return [components.index(self.component), [call.given for call in self.calls]]

    def failed(self, reason: str) -> list[Result]:
        return [[reason] * len(call.indices) for call in self.calls]


class State:
    """The state of one `RewardPool.judging`. A context manager.

    Another thread may call `send`, `close` and `give_up`.
    """

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self.todo: deque[int] = deque()
        self.results: dict[int, list[Result]] = {}
        self.deaths: Counter[int] = Counter()
        self.alone: set[int] = set()
        """Tasks that get a process for themselves: one of those that ran at the same time was bad."""
        self.lost_s = 0.0
        """Time of the processes that went into failed tasks."""
        self.bell = os.eventfd(0, os.EFD_CLOEXEC)
        """A descriptor that can be read when there is something to `receive`."""
        self._inbox: SimpleQueue[list[Task]] = SimpleQueue()
        self._is_open = True
        self._is_given_up = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.bell)

    def send(self, tasks: list[Task]) -> None:
        """Add tasks."""
        self._inbox.put(tasks)
        os.eventfd_write(self.bell, 1)

    def close(self) -> None:
        """No tasks will follow."""
        self._is_open = False
        os.eventfd_write(self.bell, 1)

    def give_up(self) -> None:
        """Nobody waits for the results any more."""
        self._is_given_up = True
        os.eventfd_write(self.bell, 1)

    def receive(self) -> None:
        """Take the tasks that were sent."""
        os.eventfd_read(self.bell)
        self._take()

    def _take(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                tasks = self._inbox.get_nowait()
                self.todo += range(len(self.tasks), len(self.tasks) + len(tasks))
                self.tasks += tasks

    @property
    def expects_more(self) -> bool:
        if self._is_given_up:
            return False
        if self._is_open:
            return True
        self._take()  # what was sent before it was closed
        return len(self.results) < len(self.tasks)

    def next_chunk(self, config: RewardConfig) -> list[int]:
        """Take the tasks that a process gets next: some of one reward."""
        component = self.tasks[self.todo[0]].component
        tasks = sum(task.component is component for task in self.tasks)
        size = component.chunk(tasks, config.concurrency, config.num_processes)
        chunk = [self.todo.popleft()]
        while len(chunk) < size and self.todo and not {chunk[0], self.todo[0]} & self.alone:
            if self.tasks[self.todo[0]].component is not component:
                break
            chunk.append(self.todo.popleft())
        return chunk

    def fail(self, index: int, reason: str) -> None:
        self.results[index] = self.tasks[index].failed(reason)

    def died(self, index: int, ending: str) -> None:
        """Note that the task has ended its process; it waits to be tried again."""
        self.deaths[index] += 1
        if self.deaths[index] >= _MAX_ATTEMPTS:
            self.todo.remove(index)
            self.fail(index, f"ended its process ({ending})")

    def results_of(self, tasks: Sequence[Task]) -> list[tuple[Task, list[Result]]]:
        """Return the tasks with their results, once all that could be computed are."""
        found = {self.tasks[index]: results for index, results in self.results.items()}
        return [(task, found.get(task) or task.failed(NOT_TRIED)) for task in tasks]

    def matches(self, work: Sequence[int], results: list[Any]) -> bool:
        """Whether these can be the results of the first tasks of `work`."""
        if not 0 < len(results) <= len(work):
            return False
        shapes = [[len(call.indices) for call in self.tasks[i].calls] for i in list(work)[: len(results)]]
        return all(_has_shape(result, shape) for result, shape in zip(results, shapes, strict=True))


def _has_shape(result: Any, lengths: list[int]) -> bool:
    if not isinstance(result, list) or len(result) != len(lengths):
        return False
    return all(
        isinstance(call, list) and len(call) == length and all(isinstance(parts, (dict, str)) for parts in call)
        for call, length in zip(result, lengths, strict=True)
    )
