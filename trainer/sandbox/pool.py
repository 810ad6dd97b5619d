"""The pool of processes for user code: rewards, judges, environments and tools.

A pool does tasks. A task is one call, which any process can make, or a session of calls, which one process must make.
A process that hangs or dies is replaced, and its tasks are repeated, except the one that is to blame.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from multiprocessing.connection import wait
from typing import Any, Self

from trainer.errors import WorkerError
from trainer.process.failure_log import record_replaced_process
from trainer.process.tracing import OVERLAPPING, TRACER
from trainer.sandbox import limits
from trainer.sandbox.process import OutputCapture, ProcessDied, SandboxedProcess, encode, end_all
from trainer.sandbox.tasks import AsyncCalls, Round, Task
from trainer.seeding import HASH_SEED

LOG = logging.getLogger(__name__)

NOT_TRIED = "was not tried"
"""The beginning of the failure reason of a task that was never started."""


class _Batch:
    """Tasks whose calls a process has got in one message and not answered, in order."""

    def __init__(self, tasks: list[Task], limit_s: float, concurrency: int):
        self.tasks = deque(tasks)
        self.is_async = tasks[0].is_async
        self.limit_s = limit_s * -(-len(tasks) // concurrency) + limits.ASYNC_GRACE_S if self.is_async else limit_s
        self.since = self.began_at = time.monotonic()
        """When it was sent or begun; of plain calls, `since` is when the last one was answered."""
        self.is_begun = False
        self.is_small = False
        """Its message fits in the pipe beside others that the process has not read."""
        self.label, self.size = tasks[0].label, len(tasks)


class _Worker(SandboxedProcess):
    """One process of a pool."""

    def __init__(self, arguments: Sequence[Any], environment: Mapping[str, str], python: str | None):
        super().__init__("trainer.sandbox.worker:serve", arguments, environment, python, name=arguments[0])
        self.is_ready = self.is_concurrent = False
        self.sessions: dict[Task, None] = {}
        self.queue: deque[Task] = deque()
        """Sessions whose next calls it makes, in order."""
        self.batches: dict[int, _Batch] = {}
        self.since = self.checked_at = time.monotonic()
        """When it was started, and when it was last checked during its start."""
        self.charged: set[Round] = set()
        """The rounds whose failed calls have made its start necessary."""

    def can_take(self, task: Task) -> bool:
        """Return whether the next call of the task can be sent now.

        Where sessions have `async` calls, the next one can be sent when the last one has begun, or ahead of that if the
        messages are small: the pipe never fills.
        """
        if not self.is_ready or task.is_urgent:
            return self.is_ready
        if not self.is_concurrent or task.run_isolated:
            return not self.batches
        alone = any(other.run_isolated for other in self.tasks())
        waiting = self.waiting()
        may_follow = len(waiting) < limits.SENT_AHEAD and all(batch.is_small for batch in waiting)
        return may_follow and not alone and len(self.batches) < limits.MAX_ASYNC_SESSIONS

    def waiting(self) -> list[_Batch]:
        """Return the batches that it has not begun."""
        return [batch for batch in self.batches.values() if not batch.is_begun]

    def deadline(self, limit_s: float) -> float:
        """Return when to check the process, unless it sends a message before.

        Args:
            limit_s: interval of the checks while it starts.
        """
        if not self.is_ready:
            return min(self.since + limits.START_S, self.checked_at + limit_s)
        return min((batch.since + batch.limit_s for batch in self.batches.values()), default=float("inf"))

    def tasks(self) -> list[Task]:
        """Return the tasks whose calls it makes."""
        return [task for batch in self.batches.values() for task in batch.tasks]

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
    """Processes that run user code. A context manager. Any thread may open a round.

    Args:
        handler: import path of the `Handler` in the processes.
        arguments: its arguments, JSON-able.
        num_processes: how many.
        role: what the processes are for, in messages.
        name: the key of the user code with its value, for errors.
        limit: key and value of the longest time for a call.
        concurrency: `async` calls that run at the same time in a process.
        largest_message: bytes of the longest message of a process.
        python: another interpreter for the processes (see `SandboxedProcess`).
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
        python: str | None = None,
    ):
        # The cores are for ranks and engines. Sets have the same order after a restart.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": HASH_SEED}
        self._start_worker = lambda: _Worker([handler, list(arguments), concurrency], environment, python)
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
        self._failed_starts = 0
        self._lock = threading.Lock()
        self._rounds: list[Round] = []
        """Those that are open, in the order in which they began. While there is one, a thread serves them all."""
        self._wakeup_fd = -1
        """Can be read when another thread has changed something."""

    def __enter__(self) -> Self:
        self._wakeup_fd = os.eventfd(0, os.EFD_CLOEXEC)
        # The processes import their modules while engines and ranks start.
        self._workers = [self._start_worker() for _ in range(self._num_processes)]
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            left = list(self._rounds)
        for tasks in left:
            self._cancel(tasks)
        end_all(self._workers)
        self._workers = []
        with self._lock:
            os.close(self._wakeup_fd)
            self._wakeup_fd = -1

    @contextmanager
    def round(self) -> Iterator[Round]:
        """Do tasks in a thread while the block runs. Several threads may each run such a block."""
        tasks = Round(self.wake, self.log_output)
        with self._lock:
            self._rounds.append(tasks)
            if len(self._rounds) == 1:
                threading.Thread(target=self._serve, name=f"{self._role} processes", daemon=True).start()
        self.wake()
        try:
            yield tasks
        finally:
            self._cancel(tasks)

    @asynccontextmanager
    async def calls(self) -> AsyncIterator[AsyncCalls]:
        """Do tasks while the block runs, on an event loop.

        All are done after it. If it fails, they have a moment left, to close environments, and are cancelled.
        """
        with self.round() as tasks:
            calls = AsyncCalls(tasks)
            try:
                yield calls
            except BaseException:
                with suppress(Exception):
                    await asyncio.wait_for(calls.end(), limits.CANCEL_S)
                raise
            await calls.end()

    def _cancel(self, tasks: Round) -> None:
        tasks.is_cancelled = True
        self.wake()
        concurrent.futures.wait([tasks.ended])

    def wake(self) -> None:
        """Let the serving thread look at the rounds."""
        with self._lock:
            if self._wakeup_fd >= 0:  # else the pool is closed
                os.eventfd_write(self._wakeup_fd, 1)

    def log_output(self) -> None:
        """Log what the processes have printed."""
        for line in self._printed.take():
            LOG.info(line)

    def _serve(self) -> None:
        """Do the tasks of all rounds, until none is open."""
        self._failed_starts = 0
        while True:
            with self._lock:
                rounds = list(self._rounds)
            try:
                if not any([self._end_if_done(tasks) for tasks in rounds]):
                    for worker in list(self._workers):
                        self._send_tasks(worker)
                    self._listen(self._wakeup_fd)
                    continue
            except BaseException as error:  # each thread with a round raises it
                for tasks in rounds:
                    if not tasks.ended.done():
                        self._end(tasks, error)
            with self._lock:
                self._rounds = [tasks for tasks in self._rounds if not tasks.ended.done()]
                if not self._rounds:
                    return

    def _end_if_done(self, tasks: Round) -> bool:
        """Receive the tasks of a round. End it if nothing is left to do; return whether it has ended."""
        is_open = tasks.is_open  # read before the tasks are received: none follows
        for task in tasks.received():
            self._queue(task)
        key, limit_s = self._limit
        if tasks.lost_s > limits.FAILED_TIME_LIMITS * limit_s * self._num_processes:
            times = limits.FAILED_TIME_LIMITS
            reason = f"{NOT_TRIED}: failed calls had already taken {times} times {key} for each process"
            self._abandon(tasks, reason, keep_sessions=True)
        if not tasks.is_cancelled and (is_open or self._has_work(tasks)):
            return False
        self._end(tasks)
        return True

    def _has_work(self, tasks: Round) -> bool:
        waiting = (self._todo, *(queue for worker in self._workers for queue in (worker.queue, worker.tasks())))
        return any(task.round is tasks for some in waiting for task in some)

    def _end(self, tasks: Round, error: BaseException | None = None) -> None:
        """End a round. A process that is still busy with it must not answer later."""
        tasks.error = error
        try:
            self._abandon(tasks, NOT_TRIED)
            for worker in self._workers:
                self._printed.read(worker)
        except BaseException as later:
            error = error or later
        if error is None:
            tasks.ended.set_result(None)
        else:
            tasks.ended.set_exception(error)

    def _queue(self, task: Task) -> None:
        """Let a process make the next call of the task, if it needs one."""
        if task.next_call() is None:
            task.rest()
            return
        if not task.is_session:
            self._todo.append(task)
            return
        if task.worker is None:
            task.worker = min(self._workers, key=lambda worker: len(worker.sessions))
            task.worker.sessions[task] = None
        if task.is_urgent:
            task.worker.queue.appendleft(task)
        else:
            task.worker.queue.append(task)

    def _abandon(self, tasks: Round, reason: str, keep_sessions: bool = False) -> None:
        """Let all tasks of a round fail that wait or are under way.

        Args:
            keep_sessions: calls of sessions that are under way may end: other sessions live in the same process.
        """
        for worker in [worker for worker in self._workers if any(task.round is tasks for task in worker.tasks())]:
            if not (keep_sessions and worker.sessions):
                self._replace(worker)
        for waiting in (self._todo, *(worker.queue for worker in self._workers)):
            for task in [task for task in waiting if task.round is tasks]:
                waiting.remove(task)
                task.fail("timeout", reason)
                task.rest()

    def _send_tasks(self, worker: _Worker) -> None:
        while (waiting := worker.queue or self._todo) and worker.can_take(waiting[0]):
            tasks = self._next_tasks(waiting)
            batch = _Batch(tasks, (tasks[0].limit or self._limit)[1], self._concurrency)
            number = next(self._numbers)
            message = encode([number, [task.next_call() for task in tasks]])
            batch.is_small = len(message) <= limits.SMALL_MESSAGE
            if not batch.is_small and not tasks[0].is_urgent and worker.waiting():
                waiting.extendleft(reversed(tasks))
                return
            worker.batches[number] = batch
            try:
                worker.send(message)
            except ProcessDied:
                self._handle_worker_death(worker)
                return

    def _next_tasks(self, waiting: deque[Task]) -> list[Task]:
        """Take the tasks that a process gets next: several of one kind, or one that needs a process for itself."""
        first = waiting.popleft()
        tasks = [first]
        most = limits.ASYNC_ROUNDS * self._concurrency if first.is_async else limits.PLAIN_BATCH
        share = -(-(1 + len(waiting)) // self._num_processes)
        size = min(most, 1 + len(waiting) if first.is_session else share)
        if first.run_isolated or first.is_session and first.is_async:
            size = 1
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
                    for batch in (worker.batches[number], *worker.waiting()):  # they come after it
                        batch.since = batch.began_at = time.monotonic()
                case {"number": int(number), "results": [_, *_] as results, "last": bool(is_last)} if (
                    number in worker.batches and len(results) <= len(worker.batches[number].tasks)
                ):
                    self._answer(worker, number, results, is_last)
                case {"left": str()} if worker.batches:
                    self._replace(worker, "left", "left a process running")
                case {"ready": bool(is_concurrent)}:
                    for tasks in worker.charged:
                        tasks.lost_s += time.monotonic() - max(worker.since, tasks.since)
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
        failed: list[Task] = []
        for result in results:
            task = batch.tasks[0]
            failed = [task] if self._take(task, result) else []
            _charge(failed, cost_s)
            batch.tasks.popleft()
            if task.worker is None:
                worker.sessions.pop(task, None)
            self._queue(task)
        batch.since = now
        if not batch.tasks:
            del worker.batches[number]
            self._trace(worker, batch, batch.label)
        if is_last:
            self._replace(worker, because_of=failed)

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

    def _replace(self, worker: _Worker, status: str = "", reason: str = "", because_of: Sequence[Task] = ()) -> str:
        """Replace a process by a new one, and repeat its tasks. Return how it ended.

        If it worked on one task, that one is to blame. If it worked on several, each is repeated in a process for
        itself: that shows which one it is.

        Args:
            status: how the task that is to blame has failed (see `Task.retried`); empty: none is.
            reason: why it has failed. Empty: it has ended the process.
            because_of: the process is replaced because calls of these tasks have failed.
        """
        suspects = worker.suspects() if status else []
        _charge(suspects, worker.busy_s())
        for batch in worker.batches.values():
            self._trace(worker, batch, f"{batch.label} ended")
        ending = worker.end(died=bool(status) and not reason)
        self._printed.read(worker)
        worker.close()
        new = self._start_worker()
        new.charged = {task.round for task in (*because_of, *suspects) if task.round is not None}
        self._workers[self._workers.index(worker)] = new
        for session in worker.sessions:
            session.worker = None
            session.restart()
        if len(suspects) == 1:
            suspects[0].record_failure(status, reason or f"ended its process ({ending})")
        else:
            for task in suspects:
                task.run_isolated = True
        for task in [*worker.tasks(), *worker.queue]:
            self._queue(task)
        return ending

    def _trace(self, worker: _Worker, batch: _Batch, name: str) -> None:
        if TRACER.is_on:
            process = f"{self._role} {self._workers.index(worker)}"
            TRACER.add(name, batch.began_at, time.monotonic(), OVERLAPPING, process, calls=batch.size)


def _charge(tasks: Sequence[Task], seconds: float) -> None:
    """Note that failed calls of these tasks have taken this time."""
    for tasks_of_one in {task.round for task in tasks if task.round is not None}:
        tasks_of_one.lost_s += seconds
