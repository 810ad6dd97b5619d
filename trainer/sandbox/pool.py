"""The pool of processes for user code: rewards, judges, environments and tools.

A pool does tasks. A task is one call, which any process can make, or a session of calls, which one process must make.
A process that hangs or dies is replaced, and its tasks are repeated, except the one that is to blame.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import logging
import os
import queue
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import wait
from typing import Any, Self

from trainer.errors import WorkerError
from trainer.process.failure_log import record_replaced_process
from trainer.process.signals import SIGNALS
from trainer.sandbox import limits
from trainer.sandbox.process import OutputCapture, ProcessDied, SandboxedProcess, end_all

LOG = logging.getLogger(__name__)

NOT_TRIED = "was not tried"
"""The beginning of the failure reason of a task that was never started."""


class Task:
    """Work for the processes of a pool. A base class."""

    kind: Any = None
    """Tasks of the same kind may travel in one message."""
    limit: tuple[str, float] | None = None
    """Key and value of the longest time for one call. None: those of the pool."""
    is_session = False
    """All calls must be made by the same process. If it is lost, the session begins again in another."""
    is_async = False
    retried: frozenset[str] = frozenset({"died"})
    """Failures after which the task is tried again: `died`, `timeout`, `raised`."""

    def __init__(self) -> None:
        self.failures = 0
        self.run_isolated = False
        """It gets a process for itself: one of several tasks that ran at the same time was bad."""
        self.worker: _Worker | None = None
        """The process of a session."""

    def next_call(self) -> list[Any] | None:
        """Return the next call, for `Handler.compute`; None: there is nothing to do."""
        raise NotImplementedError

    def take(self, value: Any) -> bool:
        """Take what the call has returned. Return whether that counts as a failure.

        Raises:
            ProcessDied: it cannot be from the handler: user code wrote into the pipe.
        """
        raise NotImplementedError

    def fail(self, status: str, reason: str) -> None:
        """Fail the task for good."""
        raise NotImplementedError

    def restart(self) -> None:
        """Begin again: what the process knew is lost."""

    def record_failure(self, status: str, reason: str) -> None:
        """Note that a call has failed: the task is tried again, or has failed for good."""
        self.failures += 1
        if self.failures >= limits.MAX_ATTEMPTS or status not in self.retried:
            self.fail(status, reason)
        else:
            self.restart()


class Round:
    """Tasks that a pool does while the block of `WorkerPool.round` runs."""

    def __init__(self, pool: WorkerPool):
        self._pool = pool
        self._inbox: queue.SimpleQueue[Sequence[Task]] = queue.SimpleQueue()
        self.wakeup_fd = os.eventfd(0, os.EFD_CLOEXEC)
        """A descriptor that can be read when another thread has changed something."""
        self.is_open = True
        self.is_cancelled = False
        self.serving: Future[None]

    def submit(self, tasks: Sequence[Task]) -> None:
        """Begin to do tasks.

        Raises:
            WorkerError: the processes cannot start.
        """
        if self.serving.done():
            self.serving.result()  # raises if it has failed
        self._inbox.put(tasks)
        os.eventfd_write(self.wakeup_fd, 1)

    def wait(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Wait until all tasks are done or have failed. No others can follow.

        Args:
            meanwhile: called twice a second.

        Raises:
            WorkerError: the processes cannot start.
        """
        self.is_open = False
        os.eventfd_write(self.wakeup_fd, 1)
        with SIGNALS.waiting():
            while not self.serving.done():  # not in one wait, which signals could not interrupt
                concurrent.futures.wait([self.serving], 0.5)
                meanwhile()
        self.serving.result()
        self._pool.log_output()

    def received(self) -> Iterator[Task]:
        """Yield the tasks that were submitted since the last call."""
        with contextlib.suppress(queue.Empty):
            while True:
                yield from self._inbox.get_nowait()


class _Batch:
    """Tasks whose calls a process has got in one message and not answered, in order."""

    def __init__(self, tasks: list[Task], limit_s: float, concurrency: int):
        self.tasks = deque(tasks)
        self.is_async = tasks[0].is_async
        self.limit_s = limit_s * -(-len(tasks) // concurrency) + limits.ASYNC_GRACE_S if self.is_async else limit_s
        self.since = time.monotonic()
        """When it was sent or begun; of plain calls, when the last one was answered."""
        self.is_begun = False


class _Worker(SandboxedProcess):
    """One process of a pool."""

    def __init__(self, arguments: Sequence[Any], environment: Mapping[str, str]):
        super().__init__("trainer.sandbox.worker:serve", arguments, environment)
        self.is_ready = self.is_concurrent = False
        self.sessions: dict[Task, None] = {}
        self.queue: deque[Task] = deque()
        """Sessions whose next calls it makes, in order."""
        self.batches: dict[int, _Batch] = {}
        self.since = self.checked_at = time.monotonic()
        """When it was started, and when it was last checked during its start."""
        self.replaces_failed = False

    def can_take(self, task: Task) -> bool:
        """Return whether the next call of the task can be sent now.

        Where sessions have `async` calls, the next one can be sent when the last one has begun: the pipe never fills.
        """
        if not self.is_ready:
            return False
        if not self.is_concurrent or task.run_isolated:
            return not self.batches
        alone = any(other.run_isolated for batch in self.batches.values() for other in batch.tasks)
        has_begun = all(batch.is_begun for batch in self.batches.values())
        return has_begun and not alone and len(self.batches) < limits.MAX_ASYNC_SESSIONS

    def deadline(self, limit_s: float) -> float:
        """Return when to check the process, unless it sends a message before.

        Args:
            limit_s: interval of the checks while it starts.
        """
        if not self.is_ready:
            return min(self.since + limits.START_S, self.checked_at + limit_s)
        return min((batch.since + batch.limit_s for batch in self.batches.values()), default=float("inf"))

    def suspects(self) -> list[Task]:
        """Return the tasks one of which is to blame if the process dies: those that were being worked on."""
        begun = [batch for batch in self.batches.values() if batch.is_begun] or list(self.batches.values())
        return [task for batch in begun for task in (batch.tasks if batch.is_async else [batch.tasks[0]])]

    def busy_s(self) -> float:
        """Return how long the oldest of the calls under way has taken."""
        return max((time.monotonic() - batch.since for batch in self.batches.values()), default=0.0)

    def restart_clocks(self) -> None:
        for part in (self, *self.batches.values()):
            part.since = time.monotonic()
        self.checked_at = self.since


class WorkerPool:
    """Processes that run user code. A context manager.

    Args:
        handler: import path of the `Handler` in the processes.
        arguments: its arguments, JSON-able.
        num_processes: how many.
        role: what the processes are for, in messages.
        name: the key of the user code with its value, for errors.
        limit: key and value of the longest time for a call.
        concurrency: `async` calls that run at the same time in a process.
        largest_message: bytes of the longest message of a process.
    """

    def __init__(
        self,
        handler: str,
        arguments: Sequence[Any],
        num_processes: int,
        *,
        role: str,
        name: str,
        limit: tuple[str, float],
        concurrency: int = 1,
        largest_message: int = limits.LARGEST_MESSAGE,
    ):
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # the cores are for ranks and engines
        self._start_worker = lambda: _Worker([handler, list(arguments), concurrency], environment)
        self._num_processes = num_processes
        self._role = role
        self._name = name
        self._limit = limit
        self._concurrency = concurrency
        self._largest_message = largest_message
        self._workers: list[_Worker] = []
        self._todo: deque[Task] = deque()
        """Tasks that any process can do."""
        self._numbers = itertools.count()
        self._printed = OutputCapture(role)
        self._begin_round()

    def __enter__(self) -> Self:
        # The processes import their modules while engines and ranks start.
        self._workers = [self._start_worker() for _ in range(self._num_processes)]
        return self

    def __exit__(self, *_: object) -> None:
        end_all(self._workers)
        self._workers = []

    @contextmanager
    def round(self) -> Iterator[Round]:
        """Do tasks in a thread while the block runs. Only one such block may run at a time."""
        tasks = Round(self)
        with ThreadPoolExecutor(1) as thread:
            tasks.serving = thread.submit(self._serve, tasks)
            try:
                yield tasks
            finally:
                tasks.is_cancelled = True
                os.eventfd_write(tasks.wakeup_fd, 1)
                concurrent.futures.wait([tasks.serving])  # the thread reads the descriptor
                os.close(tasks.wakeup_fd)

    def log_output(self) -> None:
        """Log what the processes have printed."""
        for line in self._printed.take():
            LOG.info(line)

    def _begin_round(self) -> None:
        self._failed_starts = 0
        self._lost_s = 0.0
        """Seconds that the processes spent on failed calls, in this round."""
        self._round_since = time.monotonic()

    def _serve(self, tasks: Round) -> None:
        """Do the tasks of a round, until failed calls have taken too much time."""
        self._begin_round()
        key, limit_s = self._limit
        most_s = limits.FAILED_TIME_LIMITS * limit_s * self._num_processes
        reason = f"{NOT_TRIED}: failed calls had already taken {limits.FAILED_TIME_LIMITS} times {key} for each process"
        try:
            while not tasks.is_cancelled:
                is_open = tasks.is_open  # read before the tasks are received: none follows
                for task in tasks.received():
                    self._queue(task)
                if self._lost_s > most_s:
                    self._abandon(reason, keep_sessions=True)
                if not (is_open or self._todo or any(worker.queue or worker.batches for worker in self._workers)):
                    break
                for worker in list(self._workers):
                    self._send_tasks(worker)
                self._listen(tasks.wakeup_fd)
        finally:
            self._abandon(NOT_TRIED)  # a process that is still busy must not answer in the next round
            for worker in self._workers:
                self._printed.read(worker)

    def _queue(self, task: Task) -> None:
        """Let a process make the next call of the task, if it needs one."""
        if task.next_call() is None:
            return
        if not task.is_session:
            self._todo.append(task)
            return
        if task.worker is None:
            task.worker = min(self._workers, key=lambda worker: len(worker.sessions))
            task.worker.sessions[task] = None
        task.worker.queue.append(task)

    def _abandon(self, reason: str, keep_sessions: bool = False) -> None:
        """Let all tasks fail that wait or are under way.

        Args:
            keep_sessions: calls of sessions that are under way may end: other sessions live in the same process.
        """
        for worker in [worker for worker in self._workers if worker.batches]:
            if not (keep_sessions and worker.sessions):
                self._replace(worker)
        for waiting in (self._todo, *(worker.queue for worker in self._workers)):
            while waiting:
                waiting.popleft().fail("timeout", reason)

    def _send_tasks(self, worker: _Worker) -> None:
        while (waiting := worker.queue or self._todo) and worker.can_take(waiting[0]):
            tasks = self._next_tasks(waiting)
            batch = _Batch(tasks, (tasks[0].limit or self._limit)[1], self._concurrency)
            number = next(self._numbers)
            worker.batches[number] = batch
            try:
                worker.send([number, [task.next_call() for task in batch.tasks]])
            except ProcessDied:
                self._handle_worker_death(worker)
                return

    def _next_tasks(self, waiting: deque[Task]) -> list[Task]:
        """Take the tasks that a process gets next: several of one kind, or one that needs a process for itself."""
        first = waiting.popleft()
        tasks = [first]
        most = limits.ASYNC_ROUNDS * self._concurrency if first.is_async else limits.PLAIN_BATCH
        share = -(-(1 + len(waiting)) // self._num_processes)
        size = 1 if first.is_session or first.run_isolated else min(most, share)
        while len(tasks) < size and waiting[0].kind is first.kind and not waiting[0].run_isolated:
            tasks.append(waiting.popleft())
        return tasks

    def _listen(self, wakeup_fd: int) -> None:
        """Wait for messages, output, or the next time limit, and handle them."""
        begin = time.monotonic()
        timeout_s = max(0.0, min(worker.deadline(self._limit[1]) for worker in self._workers) - begin)
        pipes = [pipe for worker in self._workers for pipe in (worker.pipe, worker.output)]
        readable = set(wait([wakeup_fd, *pipes], None if timeout_s == float("inf") else timeout_s))
        was_stopped = time.monotonic() > begin + timeout_s + 1  # perhaps the whole job was stopped by a signal
        if wakeup_fd in readable:
            os.eventfd_read(wakeup_fd)
        for worker in list(self._workers):
            if was_stopped:
                worker.restart_clocks()
            if worker.output in readable:
                self._printed.read(worker)
            if worker.pipe in readable:
                self._receive(worker)
            elif time.monotonic() > worker.deadline(self._limit[1]) and not worker.pipe.poll():
                self._handle_timeout(worker)

    def _receive(self, worker: _Worker) -> None:
        try:
            match worker.receive(self._largest_message):
                case {"begun": int(number)} if number in worker.batches:
                    worker.batches[number].is_begun = True
                    worker.batches[number].since = time.monotonic()
                case {"number": int(number), "results": [_, *_] as results, "last": bool(is_last)} if (
                    number in worker.batches and len(results) <= len(worker.batches[number].tasks)
                ):
                    self._answer(worker, number, results, is_last)
                case {"left": str()} if worker.batches:
                    self._replace(worker, "left", "left a process running")
                case {"ready": bool(is_concurrent)}:
                    if worker.replaces_failed:
                        self._lost_s += time.monotonic() - max(worker.since, self._round_since)
                    worker.is_ready, worker.is_concurrent, self._failed_starts = True, is_concurrent, 0
                case {"cannot_start": str(reason)}:
                    raise WorkerError(f"the processes of {self._name} die as they start: {reason}")
                case _:  # user code wrote into the pipe
                    raise ProcessDied
        except ProcessDied:
            self._handle_worker_death(worker)

    def _answer(self, worker: _Worker, number: int, results: list[Any], is_last: bool) -> None:
        """Take the results of the first tasks of a batch. `is_last`: the process will not answer again."""
        batch, now = worker.batches[number], time.monotonic()
        cost_s = (now - batch.since) / len(results) / len(worker.batches)
        failed = False
        for result in results:
            failed = self._take(batch.tasks[0], result)
            self._lost_s += cost_s * failed
            task = batch.tasks.popleft()
            if task.worker is None:
                worker.sessions.pop(task, None)
            self._queue(task)
        batch.since = now
        if not batch.tasks:
            del worker.batches[number]
        if is_last:
            self._replace(worker, failed=failed)

    def _take(self, task: Task, result: Any) -> bool:
        """Give a task its result. Return whether that is a failure."""
        match result:
            case {"value": value}:
                return task.take(value)
            case {"raised": str(reason)}:
                task.record_failure("raised", reason)
            case {"timeout": True}:
                task.record_failure("timeout", self._too_slow(task))
            case _:
                raise ProcessDied
        return True

    def _too_slow(self, task: Task) -> str:
        key, limit_s = task.limit or self._limit
        return f"took longer than {key}={limit_s:g}"

    def _handle_timeout(self, worker: _Worker) -> None:
        """End a process that takes too long. A process that was stopped by a signal counts as dead."""
        if worker.is_stopped:
            self._handle_worker_death(worker, is_stopped=True)
        elif worker.is_ready:
            self._replace(worker, "timeout", self._too_slow(worker.suspects()[0]))
        else:
            worker.checked_at = time.monotonic()
            if worker.checked_at > worker.since + limits.START_S:
                raise WorkerError(f"a process of {self._name} has not started after {limits.START_S:g} s")

    def _handle_worker_death(self, worker: _Worker, is_stopped: bool = False) -> None:
        """Replace a process that has died, or was stopped by a signal."""
        cost_s = worker.busy_s()
        ending = self._replace(worker, "died", "ended its process (stopped by a signal)" if is_stopped else "")
        ending = "stopped by a signal" if is_stopped else ending
        record_replaced_process(self._role, ending, cost_s)
        if worker.is_ready:
            return
        self._failed_starts += 1
        if self._failed_starts >= limits.MAX_FAILED_STARTS:
            printed = self._printed.last_line()
            output = f"; the last output: {printed}" if printed else ""
            raise WorkerError(f"the processes of {self._name} die as they start ({ending}){output}")

    def _replace(self, worker: _Worker, status: str = "", reason: str = "", failed: bool = False) -> str:
        """Replace a process by a new one, and repeat its tasks. Return how it ended.

        If it worked on one task, that one is to blame. If it worked on several, each is repeated in a process for
        itself: that shows which one it is.

        Args:
            status: how the task that is to blame has failed (see `Task.retried`); empty: none is.
            reason: why it has failed. Empty: it has ended the process.
            failed: the process is replaced because of a call that has failed.
        """
        suspects = worker.suspects() if status else []
        self._lost_s += worker.busy_s() if status else 0.0
        ending = worker.end(died=bool(status) and not reason)
        self._printed.read(worker)
        worker.close()
        new = self._start_worker()
        new.replaces_failed = failed or bool(suspects)
        self._workers[self._workers.index(worker)] = new
        for session in worker.sessions:
            session.worker = None
            session.restart()
        if len(suspects) == 1:
            suspects[0].record_failure(status, reason or f"ended its process ({ending})")
        else:
            for task in suspects:
                task.run_isolated = True
        for task in [*(task for batch in worker.batches.values() for task in batch.tasks), *worker.queue]:
            self._queue(task)
        return ending
