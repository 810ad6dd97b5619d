"""Rewards are computed in processes of their own: a reward that hangs or crashes costs one completion."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections import Counter, deque
from collections.abc import Sequence
from multiprocessing.connection import wait
from typing import Any

from trainer.config import RewardConfig
from trainer.errors import UserError, WorkerError
from trainer.isolation.process import GuardedProcess, PrintedText, ProcessDied, end_all
from trainer.rewards.components import Call, Component, RewardInput, components_of
from trainer.rewards.scores import NOT_TRIED, Scores, add_up
from trainer.rewards.store import Result, RewardStore

LOG = logging.getLogger(__name__)

LOST_LIMITS = 30
"""Failing rewards may take this many times `reward.timeout_s` of each process in one call of `score`."""
_TRIES = 2
"""A completion whose process dies is retried once: something else may have killed the process."""
_STARTS = 3
"""This many processes in a row may die before they are ready; then the run fails."""
_START_S = 600.0
"""Longest time for the imports of a process."""
_LARGEST_MESSAGE = 1 << 24


class _Worker(GuardedProcess):
    """One process that computes rewards."""

    def __init__(self, config: RewardConfig, environment: dict[str, str]):
        remote = {"url": config.url, **dataclasses.asdict(config.remote)}
        del remote["completions_per_request"]
        arguments = [config.names(), config.timeout_s, config.concurrency, remote]
        super().__init__("trainer.rewards.worker:serve", arguments, environment)
        self.ready = False
        self.work: deque[int] = deque()
        """Tasks that it has received and not answered, in order."""
        self.since = time.monotonic()
        """When it was started, or when it began with the first task of `work`."""
        self.replaces_failed = False


class RewardPool:
    """`reward.num_processes` processes that compute rewards. A context manager.

    Args:
        store: for results that are not to be computed again.

    Raises:
        UserError: there is no such reward, or it wants what no reward gets.
    """

    def __init__(self, config: RewardConfig, store: RewardStore | None = None):
        self.components = components_of(config)  # a wrong name fails here, not at the first step
        self._config = config
        self._store = store
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # the cores are for ranks and engines
        self._workers: list[_Worker] = []
        self._bad_starts = 0
        self._printed = PrintedText("reward")

    def __enter__(self) -> RewardPool:
        # The processes import their modules while engines and ranks start.
        self._workers = [_Worker(self._config, self._environment) for _ in range(self._config.num_processes)]
        return self

    def __exit__(self, *_: object) -> None:
        end_all(self._workers)
        self._workers = []

    def score(self, attempts: Sequence[RewardInput], n: int = 1, step: str = "") -> Scores:
        """Return the rewards in order, and the failures: a reward that raises, hangs or is not a number counts as 0.

        Log the failures, and what reward functions have printed.

        Args:
            n: completions in a group; those of one group are together.
            step: names what the rewards are for, in the store and in errors.

        Raises:
            UserError: more than `reward.max_failure_frac` of the rewards have failed.
            WorkerError: the processes cannot start.
        """
        results = self.judge(attempts, n, step)
        scores = add_up(results, len(attempts))
        for line in [*self._printed.take(), *scores.failures.lines(LOST_LIMITS)]:
            LOG.info(line)
        problem = scores.failures.problem(len(attempts), self._config.max_failure_frac, step)
        self._keep(results, step, failures=problem is None)
        if problem is not None:
            raise UserError(problem)
        return scores

    def judge(self, attempts: Sequence[RewardInput], n: int, step: str) -> dict[Component, dict[Call, Result]]:
        """Return the result of each call of each reward (see `score`)."""
        calls = {component: component.calls(attempts, n) for component in self.components}
        known: dict[str, Result] = {}
        if self._store is not None:
            keys = {call.key for group in calls.values() for call in group if call.key}
            found = {key: self._store.find(key, step) for key in keys}
            known = {key: result for key, result in found.items() if result is not None}
        tasks = []
        for component, group in calls.items():
            new, size = _each_once([call for call in group if call.key not in known]), component.batch
            tasks += [_Task(component, new[i : i + size]) for i in range(0, len(new), size)]
        state = _State(tasks)
        self._compute(state)
        made: dict[Call, Result] = {}
        for index, task in enumerate(tasks):
            made |= zip(task.calls, state.result(index), strict=True)
        known |= {call.key: result for call, result in made.items() if call.key}
        return {
            component: {call: known[call.key] if call.key else made[call] for call in group}
            for component, group in calls.items()
        }

    def _keep(self, results: dict[Component, dict[Call, Result]], step: str, failures: bool) -> None:
        """Store the results that are to be stored. `failures`: those of failed calls too."""
        if self._store is None:
            return
        new = {call.key: result for group in results.values() for call, result in group.items() if call.key}
        chosen = {key: result for key, result in new.items() if failures or not any(isinstance(r, str) for r in result)}
        self._store.add({key: result for key, result in chosen.items() if self._store.find(key, step) is None}, step)

    def _compute(self, state: _State) -> None:
        """Compute the results of all tasks, as far as failed ones leave time for it."""
        self._bad_starts = 0
        limit_s = LOST_LIMITS * max(component.limit_s for component in self.components) * self._config.num_processes
        try:
            while state.missing and state.lost_s <= limit_s:
                for worker in self._workers:
                    if worker.ready and not worker.work and state.todo:
                        self._give(state, worker)
                self._listen(state)
        finally:  # a process that is still busy must not answer the next call
            for worker in [worker for worker in self._workers if worker.work]:
                self._replace(state, worker, failed=False)
            for worker in self._workers:
                self._printed.read(worker)

    def _give(self, state: _State, worker: _Worker) -> None:
        worker.work.extend(state.next_chunk(self._config))
        worker.since = time.monotonic()
        try:
            worker.send([state.tasks[i].message(self.components) for i in worker.work])
        except ProcessDied:
            self._replace(state, worker, failed=False)

    def _listen(self, state: _State) -> None:
        """Wait for messages, output, or the next time limit, and handle them."""
        begin = time.monotonic()
        patience = max(0.0, min(self._deadline(state, worker) for worker in self._workers) - begin)
        heard = set(wait([end for worker in self._workers for end in (worker.pipe, worker.output)], patience))
        stopped = time.monotonic() > begin + patience + 1  # perhaps the whole job was stopped: restart the clocks
        for worker in list(self._workers):
            if stopped:
                worker.since = time.monotonic()
            if worker.output in heard:
                self._printed.read(worker)
            if worker.pipe in heard:
                self._hear(state, worker)
            elif (
                time.monotonic() > self._deadline(state, worker) and not worker.pipe.poll()
            ):  # no message arrived in the meantime
                if not worker.ready:
                    raise WorkerError(f"a process of {self._config.key()} has not started after {_START_S:g} s")
                self._give_up(state, worker)

    def _deadline(self, state: _State, worker: _Worker) -> float:
        if not worker.ready:
            return worker.since + _START_S
        if not worker.work:
            return float("inf")
        component = state.tasks[worker.work[0]].component
        return worker.since + component.patience_s(len(worker.work), self._config.concurrency)

    def _give_up(self, state: _State, worker: _Worker) -> None:
        """End a process that takes too long."""
        task = state.tasks[worker.work[0]]
        if task.component.calling.is_async and len(worker.work) > 1:
            state.alone.update(worker.work)  # one of them blocks the others
        else:
            state.fail(worker.work.popleft(), f"took longer than {task.component.limit}")
        self._replace(state, worker, failed=True)

    def _hear(self, state: _State, worker: _Worker) -> None:
        try:
            match worker.receive(_LARGEST_MESSAGE):
                case {"results": [*results], "last": bool() as last} if state.matches(worker.work, results):
                    self._answer(state, worker, results, last)
                case {"left": str()} if worker.work:
                    state.alone.update(worker.work)
                    self._replace(state, worker, failed=True)
                case {"ready": True}:
                    if worker.replaces_failed:
                        state.lost_s += time.monotonic() - worker.since
                    worker.ready, self._bad_starts = True, 0
                case {"cannot_start": str() as reason}:
                    raise WorkerError(f"the processes of {self._config.key()} die as they start: {reason}")
                case _:  # user code wrote into the pipe
                    raise ProcessDied
        except ProcessDied:
            self._bury(state, worker)

    def _answer(self, state: _State, worker: _Worker, results: list[list[Result]], last: bool) -> None:
        """Take the results of the worker's first tasks. `last`: the process will not answer again."""
        now, failed = time.monotonic(), 0
        for result in results:
            index = worker.work.popleft()
            state.results[index] = result
            failed += any(isinstance(parts, str) for call in result for parts in call)
        state.lost_s += (now - worker.since) * failed / len(results)
        worker.since = now
        if last:
            self._replace(state, worker, failed=failed > 0)

    def _bury(self, state: _State, worker: _Worker) -> None:
        """Handle the death of a process. Its first task is the suspect; without one, the start has failed."""
        suspects = list(worker.work)
        if suspects and not state.tasks[suspects[0]].component.calling.is_async:
            suspects = suspects[:1]
        ending = self._replace(state, worker, bool(suspects), died=True)
        if len(suspects) > 1:
            state.alone.update(suspects)
        elif suspects:
            state.died(suspects[0], ending)
        elif not worker.ready:
            self._bad_starts += 1
            if self._bad_starts >= _STARTS:
                printed = self._printed.last_line()
                output = f"; the last output: {printed}" if printed else ""
                raise WorkerError(f"the processes of {self._config.key()} die as they start ({ending}){output}")

    def _replace(self, state: _State, worker: _Worker, failed: bool, died: bool = False) -> str:
        """Replace a process by a new one, and queue its tasks again. Return how the process ended."""
        if failed:
            state.lost_s += time.monotonic() - worker.since
        state.todo.extendleft(reversed(worker.work))
        worker.work.clear()
        ending = worker.end(died)
        self._printed.read(worker)
        worker.close()
        new = _Worker(self._config, self._environment)
        new.replaces_failed = failed
        self._workers[self._workers.index(worker)] = new
        return ending


@dataclasses.dataclass(frozen=True)
class _Task:
    """Calls of one reward that a process makes in one go."""

    component: Component
    calls: list[Call]

    def message(self, components: list[Component]) -> list[Any]:
        return [components.index(self.component), [call.given for call in self.calls]]

    def failed(self, reason: str) -> list[Result]:
        return [[reason] * len(call.indices) for call in self.calls]


class _State:
    """The state of one call of `RewardPool.judge`."""

    def __init__(self, tasks: list[_Task]):
        self.tasks = tasks
        self.todo = deque(range(len(tasks)))
        self.results: dict[int, list[Result]] = {}
        self.deaths: Counter[int] = Counter()
        self.alone: set[int] = set()
        """Tasks that get a process for themselves: one of those that ran at the same time was bad."""
        self.lost_s = 0.0
        """Time of the processes that went into failed tasks."""

    @property
    def missing(self) -> bool:
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
        if self.deaths[index] >= _TRIES:
            self.todo.remove(index)
            self.fail(index, f"ended its process ({ending})")

    def result(self, index: int) -> list[Result]:
        return self.results.get(index) or self.tasks[index].failed(NOT_TRIED)

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


def _each_once(calls: Sequence[Call]) -> list[Call]:
    """Return the calls without those whose key an earlier one has."""
    first: dict[str | int, Call] = {}
    for call in calls:
        first.setdefault(call.key or id(call), call)
    return list(first.values())
