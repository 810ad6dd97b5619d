"""Rewards are computed in processes of their own: a reward that hangs or crashes costs one completion."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import wait

from trainer.config import RewardConfig
from trainer.errors import UserError, WorkerError
from trainer.process.failure_log import record_replaced_process
from trainer.rewards.cache import Result, RewardCache
from trainer.rewards.scores import Scores, add_up
from trainer.rewards.scoring import ScoringSession, State
from trainer.rewards.terms import Call, RewardFunction, RewardInput, components_of
from trainer.sandbox.process import GuardedProcess, OutputCapture, ProcessDied, end_all

LOG = logging.getLogger(__name__)

LOST_LIMITS = 30
"""Failing rewards may take this many times `reward.timeout_s` of each process in one call of `score`."""
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
        self.looked = self.since
        """When it was started, or when it was last seen not to be stopped while it started."""
        self.replaces_failed = False


class RewardPool:
    """`reward.num_processes` processes that compute rewards. A context manager.

    Args:
        store: for results that are not to be computed again.

    Raises:
        UserError: there is no such reward, or it wants what no reward gets.
    """

    def __init__(self, config: RewardConfig, store: RewardCache | None = None):
        self.components = components_of(config)  # a wrong name fails here, not at the first step
        self._config = config
        self._store = store
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # the cores are for ranks and engines
        self._workers: list[_Worker] = []
        self._bad_starts = 0
        self._printed = OutputCapture("reward")

    def __enter__(self) -> RewardPool:
        # The processes import their modules while engines and ranks start.
        self._workers = [_Worker(self._config, self._environment) for _ in range(self._config.num_processes)]
        return self

    def __exit__(self, *_: object) -> None:
        end_all(self._workers)
        self._workers = []

    def score(self, attempts: Sequence[RewardInput], n: int = 1, step: str = "") -> Scores:
        """Return the rewards of completions that are all there (see `judging`)."""
        with self.judging(n, step) as judging:
            judging.add(0, attempts)
            return judging.scores()

    @contextmanager
    def judging(self, n: int = 1, step: str = "") -> Iterator[ScoringSession]:
        """Compute rewards while the block runs. Only one such block may run at a time.

        Args:
            n: completions in a group.
            step: names what the rewards are for, in the store and in errors.
        """
        with State() as state, ThreadPoolExecutor(1) as thread:
            try:
                yield ScoringSession(self, state, thread.submit(self._compute, state), n, step)
            finally:
                state.give_up()

    def judge(self, attempts: Sequence[RewardInput], n: int, step: str) -> dict[RewardFunction, dict[Call, Result]]:
        """Return the result of each call of each reward (see `score`)."""
        with self.judging(n, step) as judging:
            judging.add(0, attempts)
            return judging.results()

    def find(self, key: str | None, step: str) -> Result | None:
        """Return the stored result of a call; None: there is none."""
        return self._store.find(key, step) if self._store is not None and key else None

    def finish(self, results: dict[RewardFunction, dict[Call, Result]], total: int, step: str) -> Scores:
        """Add up the results, log failures and what reward functions have printed, and store the results.

        Raises:
            UserError: more than `reward.max_error_rate` of the rewards have failed.
        """
        scores = add_up(results, total)
        for line in self._printed.take():
            LOG.info(line)
        problem = scores.failures.problem(total, self._config.max_error_rate, step)
        self._keep(results, step, failures=problem is None)
        if problem is not None:
            raise UserError(problem)
        for line in scores.failures.lines(total, self._config.on_failure, LOST_LIMITS, step):
            LOG.warning(line)
        return scores

    def _keep(self, results: dict[RewardFunction, dict[Call, Result]], step: str, failures: bool) -> None:
        """Store the results that are to be stored. `failures`: those of failed calls too."""
        if self._store is None:
            return
        new = {call.key: result for group in results.values() for call, result in group.items() if call.key}
        chosen = {key: result for key, result in new.items() if failures or not any(isinstance(r, str) for r in result)}
        self._store.add({key: result for key, result in chosen.items() if self._store.find(key, step) is None}, step)

    def _compute(self, state: State) -> None:
        """Compute the results of all tasks, as far as failed ones leave time for it, until the state is closed."""
        self._bad_starts = 0
        limit_s = LOST_LIMITS * max(component.limit_s for component in self.components) * self._config.num_processes
        try:
            while state.expects_more and state.lost_s <= limit_s:
                for worker in self._workers:
                    if worker.ready and not worker.work and state.todo:
                        self._give(state, worker)
                self._listen(state)
        finally:  # a process that is still busy must not answer the next call
            for worker in [worker for worker in self._workers if worker.work]:
                self._replace(state, worker, failed=False)
            for worker in self._workers:
                self._printed.read(worker)

    def _give(self, state: State, worker: _Worker) -> None:
        worker.work.extend(state.next_chunk(self._config))
        worker.since = time.monotonic()
        try:
            worker.send([state.tasks[i].message(self.components) for i in worker.work])
        except ProcessDied:  # it has read nothing: none of its tasks is a suspect
            record_replaced_process("reward", self._replace(state, worker, failed=False, died=True), cost_s=0.0)

    def _listen(self, state: State) -> None:
        """Wait for messages, output, or the next time limit, and handle them."""
        begin = time.monotonic()
        patience = min(max(0.0, min(self._deadline(state, worker) for worker in self._workers) - begin), _START_S)
        ends = [end for worker in self._workers for end in (worker.pipe, worker.output)]
        heard = set(wait([state.bell, *ends], patience))
        stopped = time.monotonic() > begin + patience + 1  # perhaps the whole job was stopped: restart the clocks
        if state.bell in heard:
            state.receive()
        for worker in list(self._workers):
            if stopped:
                worker.since = worker.looked = time.monotonic()
            if worker.output in heard:
                self._printed.read(worker)
            if worker.pipe in heard:
                self._hear(state, worker)
            elif (
                time.monotonic() > self._deadline(state, worker) and not worker.pipe.poll()
            ):  # no message arrived in the meantime
                self._give_up(state, worker)

    def _deadline(self, state: State, worker: _Worker) -> float:
        if not worker.ready:
            return min(worker.since + _START_S, worker.looked + self._config.timeout_s)
        if not worker.work:
            return float("inf")
        component = state.tasks[worker.work[0]].component
        return worker.since + component.patience_s(len(worker.work), self._config.concurrency)

    def _give_up(self, state: State, worker: _Worker) -> None:
        """End a process that takes too long. If somebody has stopped it, its tasks are repeated as after a death."""
        if worker.is_stopped:
            self._bury(state, worker, stopped=True)
            return
        if not worker.ready:
            worker.looked = time.monotonic()
            if worker.looked > worker.since + _START_S:
                raise WorkerError(f"a process of {self._config.key()} has not started after {_START_S:g} s")
            return
        task = state.tasks[worker.work[0]]
        if task.component.calling.is_async and len(worker.work) > 1:
            state.alone.update(worker.work)  # one of them blocks the others
        else:
            state.fail(worker.work.popleft(), f"took longer than {task.component.limit}")
        self._replace(state, worker, failed=True)

    def _hear(self, state: State, worker: _Worker) -> None:
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

    def _answer(self, state: State, worker: _Worker, results: list[list[Result]], last: bool) -> None:
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

    def _bury(self, state: State, worker: _Worker, stopped: bool = False) -> None:
        """Handle the death of a process. Its first task is the suspect; without one, the start has failed.

        Args:
            stopped: it has not died, but somebody has stopped it.
        """
        suspects = list(worker.work)
        if suspects and not state.tasks[suspects[0]].component.calling.is_async:
            suspects = suspects[:1]
        cost_s = time.monotonic() - worker.since if suspects else 0.0
        ending = self._replace(state, worker, bool(suspects), died=not stopped)
        ending = "stopped by a signal" if stopped else ending
        record_replaced_process("reward", ending, cost_s)
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

    def _replace(self, state: State, worker: _Worker, failed: bool, died: bool = False) -> str:
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
