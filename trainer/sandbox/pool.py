"""The pool of processes for user code: rewards, environments and agents.

A process makes the calls that it is sent, several `async` ones at a time. A process that hangs or dies is replaced. If
it made one call, that call is to blame, and has failed. If it made several, each is lost, and whoever has asked makes
it again, alone in a process: that shows which one it is.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Self

from trainer.errors import WorkerError
from trainer.process.failures import INCIDENTS, INFRASTRUCTURE, JOB
from trainer.process.tracing import OVERLAPPING, TRACER
from trainer.sandbox import limits
from trainer.sandbox.process import OutputCapture, ProcessDied, SandboxedProcess, encode, end_all
from trainer.seeding import HASH_SEED

LOG = logging.getLogger(__name__)

_TICK_S = 0.05  # between two looks for calls that take too long


class CallFailed(Exception):  # noqa: N818 - it is no error of the trainer
    """A call has failed: it has `raised`, or its process has `died`, or it has taken too long (`timeout`)."""

    def __init__(self, status: str, reason: str):
        super().__init__(status, reason)
        self.status = status
        self.reason = reason


class CallLost(Exception):  # noqa: N818
    """The process of a call, or of its session, has ended. `is_suspect`: the call may be to blame for it."""

    def __init__(self, is_suspect: bool = False):
        super().__init__(is_suspect)
        self.is_suspect = is_suspect


@dataclass(eq=False)
class Call:
    """A call for the handler of the processes.

    Args:
        message: what the handler gets, JSON-able.
        label: its name in the timeline.
        limit: key and value of the longest time for it. None: those of the pool.
        is_async: the handler returns an awaitable. Calls of sessions are so where the handler says it.
        is_alone: the process makes no other call meanwhile.
        is_session: one process, `worker`, must make all calls of its session.
        ends_session: it is the last one of its session.
        on_sent: called on the thread of the pool when it is sent.
    """

    message: list[Any]
    label: str = "call"
    limit: tuple[str, float] | None = None
    is_async: bool = False
    is_alone: bool = False
    is_session: bool = False
    ends_session: bool = False
    worker: _Worker | None = None
    on_sent: Callable[[], None] = lambda: None
    calls: Calls | None = None  # the block in which it was made
    answer: asyncio.Future[Any] = field(init=False)
    since: float = 0.0
    """When it was sent, or its last wait ended that does not count as its time. Infinite during such a wait."""
    began_at: float = 0.0


class _Worker(SandboxedProcess):
    def __init__(self, arguments: Sequence[Any], environment: Mapping[str, str]):
        super().__init__("trainer.sandbox.worker:serve", arguments, environment, name=arguments[0])
        self.is_ready = self.is_concurrent = self.has_ended = False
        self.sessions = 0
        self.todo: deque[Call] = deque()  # calls of its sessions that it has not got
        self.calls: dict[int, Call] = {}  # those that it makes, by number
        self.since = self.checked_at = time.monotonic()
        """When it was started, and when it was last checked during its start."""

    def is_async(self, call: Call) -> bool:
        return self.is_concurrent if call.is_session else call.is_async

    def can_take(self, call: Call, most: int) -> bool:
        """Return whether a call can be sent now. `most`: `async` calls that run at the same time."""
        if not self.is_ready:
            return False
        if call.is_alone or not self.is_async(call):
            return not self.calls
        others = self.calls.values()
        return len(others) < most and all(self.is_async(other) and not other.is_alone for other in others)


class Calls:
    """The calls that are made in a block of `WorkerPool.calls`, on an event loop."""

    def __init__(self, pool: WorkerPool):
        self._pool = pool
        self._background: set[asyncio.Task[None]] = set()
        self.timeouts = 0  # calls that have taken too long, without those of sessions

    async def ask(self, call: Call) -> Any:
        """Make a call; return what the handler returns. If this is cancelled, the call is ended, too. CallFailed,
        CallLost: see there. Raises WorkerError: the processes cannot start."""
        call.calls = self
        return await asyncio.wrap_future(self._pool.submit(call))

    async def do(self, call: Call) -> Any:
        """Make a call that any process can make: again if it is lost, and once if it has ended its process. Raises
        CallFailed: it has failed for good. Raises WorkerError: the processes cannot start."""
        deaths = 0
        while True:
            try:
                return await self.ask(call)
            except CallLost as lost:
                call = replace(call, is_alone=call.is_alone or lost.is_suspect)
            except CallFailed as failed:
                deaths += 1
                if failed.status != "died" or deaths >= limits.MAX_ATTEMPTS:
                    raise

    def begin(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine that the block waits for at its end."""
        self._background.add(task := asyncio.ensure_future(coroutine))
        task.add_done_callback(self._background.discard)

    async def end(self) -> None:
        await asyncio.gather(*self._background, return_exceptions=True)


class WorkerPool:
    """Processes that run user code, and a thread that serves them. A context manager.

    Args:
        handler: import path of the `Handler` in the processes, which gets the `arguments` as JSON.
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
        # The cores are for ranks and engines. Sets have the same order after a restart.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": HASH_SEED}
        self._start_worker = lambda: _Worker([handler, list(arguments)], environment)
        self._num_processes = num_processes
        self._role = role
        self._name = name
        self._limit = limit
        self._concurrency = concurrency
        self._largest_message = largest_message
        self._workers: list[_Worker] = []
        self._todo: deque[Call] = deque()  # calls that any process can make
        self._numbers = itertools.count()
        self._printed = OutputCapture(role)
        self._failed_starts = 0
        self._error: Exception | None = None

    def __enter__(self) -> Self:
        # The processes import their modules while engines and ranks start.
        self._workers = [self._start_worker() for _ in range(self._num_processes)]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name=f"{self._role} processes", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        end_all(self._workers)
        self._workers = []

    @asynccontextmanager
    async def calls(self) -> AsyncIterator[Calls]:
        """Make calls in the block. If it fails, what it has begun has a moment left, to close environments."""
        calls = Calls(self)
        try:
            yield calls
        except BaseException:
            with suppress(Exception):
                await asyncio.wait_for(calls.end(), limits.CANCEL_S)
            raise
        else:
            await calls.end()
        finally:
            for line in self._printed.take():
                LOG.info(line)

    def submit(self, call: Call) -> Any:
        """Begin to make a call, from any thread; return a future of `concurrent.futures`."""
        return asyncio.run_coroutine_threadsafe(self._ask(call), self._loop)

    # ---------------------------------------------------------------------------------------------------
    # On the thread of the pool

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        for worker in self._workers:
            self._listen_to(worker)
        watching = self._loop.create_task(self._watch())
        self._loop.run_forever()
        watching.cancel()
        self._fail(RuntimeError("the pool has ended"))
        self._loop.run_until_complete(asyncio.gather(*asyncio.all_tasks(self._loop), return_exceptions=True))
        self._loop.close()

    def _listen_to(self, worker: _Worker) -> None:
        self._loop.add_reader(worker.pipe.fileno(), self._receive, worker)
        self._loop.add_reader(worker.output, self._printed.read, worker)

    async def _ask(self, call: Call) -> Any:
        call.answer = self._loop.create_future()
        if self._error is not None:
            raise self._error
        if call.is_session and call.worker is None:
            call.worker = min(self._workers, key=lambda worker: worker.sessions)
            call.worker.sessions += 1
        if call.worker is not None and call.worker.has_ended:
            raise CallLost
        (self._todo if call.worker is None else call.worker.todo).append(call)
        self._send_calls()
        try:
            return await call.answer
        except asyncio.CancelledError:
            if self._error is None:
                self._cancel(call)
            raise

    def _cancel(self, call: Call) -> None:
        """End a call that nobody waits for. A process that cannot end it, or does not in time, is replaced."""
        for worker in list(self._workers):
            number = next((number for number, one in worker.calls.items() if one is call), None)
            if number is not None and worker.is_async(call):
                call.limit, call.since = (self._limit[0], limits.CANCEL_S), time.monotonic()
                self._send(worker, [number, None])
            elif number is not None:
                self._replace(worker)

    def _send_calls(self) -> None:
        for worker in list(self._workers):
            while (waiting := worker.todo or self._todo) and worker.can_take(waiting[0], self._concurrency):
                call = waiting.popleft()
                if call.answer.done():  # it is cancelled
                    continue
                if call.calls is not None and call.calls.timeouts >= limits.MAX_TIMEOUTS * self._num_processes:
                    reason = f"was not tried: {call.calls.timeouts} calls had taken longer than {self._limit[0]}"
                    call.answer.set_exception(CallFailed("timeout", reason))
                    continue
                number = next(self._numbers)
                call.since = call.began_at = time.monotonic()
                worker.calls[number] = call
                call.on_sent()
                if not self._send(worker, [number, call.message]):
                    break

    def _send(self, worker: _Worker, message: list[Any]) -> bool:
        try:
            worker.send(encode(message))
        except ProcessDied:
            self._handle_death(worker)
            return False
        return True

    def _receive(self, worker: _Worker) -> None:
        try:
            match worker.receive(self._largest_message):
                case {"number": int(number), "waits": bool(waits)} if number in worker.calls:
                    worker.calls[number].since = math.inf if waits else time.monotonic()
                case {"number": int(number), "last": bool(is_last), **result} if number in worker.calls:
                    self._answer(worker, worker.calls[number], number, result)
                    if is_last:
                        self._replace(worker)
                case {"ready": bool(is_concurrent)}:
                    worker.is_ready, worker.is_concurrent, self._failed_starts = True, is_concurrent, 0
                case {"cannot_start": str(reason)}:
                    self._fail(WorkerError(f"the processes of {self._name} die as they start: {reason}"))
                    return
                case _:  # user code wrote into the pipe
                    raise ProcessDied
        except ProcessDied:
            self._handle_death(worker)
        self._send_calls()

    def _answer(self, worker: _Worker, call: Call, number: int, result: dict[str, Any]) -> None:
        match result:
            case {"value": value}:
                outcome: Any = value
            case {"raised": str(reason)}:
                outcome = CallFailed("raised", reason)
            case {"timeout": True}:
                outcome = CallFailed("timeout", self._too_slow(call))
            case _:
                raise ProcessDied
        del worker.calls[number]
        worker.sessions -= call.ends_session
        self._settle(worker, call, outcome)

    def _settle(self, worker: _Worker, call: Call, outcome: Any) -> None:
        if TRACER.is_on:
            name = f"{call.label} ended" if isinstance(outcome, CallLost) else call.label
            process = f"{self._role} {self._workers.index(worker)}"
            TRACER.add(name, call.began_at, time.monotonic(), OVERLAPPING, process, calls=1)
        if call.answer.done():  # it is cancelled
            return
        if isinstance(outcome, CallFailed) and outcome.status == "timeout" and not call.is_session:
            assert call.calls is not None
            call.calls.timeouts += 1
        if isinstance(outcome, BaseException):
            call.answer.set_exception(outcome)
        else:
            call.answer.set_result(outcome)

    def _too_slow(self, call: Call) -> str:
        return "took longer than {}={:g}".format(*(call.limit or self._limit))

    async def _watch(self) -> None:
        """End processes that take too long. Time in which the whole job was stopped by a signal does not count."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(_TICK_S)
            now = time.monotonic()
            stopped_s, last = now - last, now
            for worker in list(self._workers):
                if stopped_s > _TICK_S + 1:
                    for one in (worker, *worker.calls.values()):
                        one.since += stopped_s
                late = [call for call in worker.calls.values() if now > self._deadline(call)]
                if worker.is_ready and late and not worker.pipe.poll():
                    if worker.is_stopped:  # then user code is not to blame
                        self._handle_death(worker, is_stopped=True)
                    else:
                        self._replace(worker, "timeout", self._too_slow(late[0]))
                elif not worker.is_ready and now > worker.checked_at + self._limit[1]:
                    worker.checked_at = now
                    if worker.is_stopped:
                        self._handle_death(worker, is_stopped=True)
                    elif now > worker.since + limits.START_S:
                        reason = f"has not started after {limits.START_S:g} s"
                        self._fail(WorkerError(f"a process of {self._name} {reason}"))
            self._send_calls()

    def _deadline(self, call: Call) -> float:
        grace_s = limits.ASYNC_GRACE_S if call.is_session or call.is_async else 0.0
        return call.since + (call.limit or self._limit)[1] + grace_s

    def _handle_death(self, worker: _Worker, is_stopped: bool = False) -> None:
        if worker.has_ended:
            return
        cost_s = max((time.monotonic() - call.since for call in worker.calls.values()), default=0.0)
        ending = self._replace(worker, "died", "ended its process (stopped by a signal)" if is_stopped else "")
        ending = "stopped by a signal" if is_stopped else ending
        has_exited = ending.startswith("exit status ") and not ending.startswith("exit status -")  # negative: a signal
        failure_class, cause = (JOB, "exit") if has_exited else (INFRASTRUCTURE, "killed process")
        action, text = "replaced the process and repeated its calls", f"a {self._role} process ended ({ending})"
        INCIDENTS.note(self._role, f"{self._role} process", cause, action, text, failure_class, cost_s=cost_s)
        if worker.is_ready:
            return
        self._failed_starts += 1
        if self._failed_starts >= limits.MAX_FAILED_STARTS:
            printed = self._printed.last_line()
            output = f"; the last output: {printed}" if printed else ""
            self._fail(WorkerError(f"the processes of {self._name} die as they start ({ending}){output}"))

    def _replace(self, worker: _Worker, status: str = "", reason: str = "") -> str:
        """Replace a process by a new one. Return how it ended. `status` says how the call that is to blame, if any, has
        failed (see `CallFailed`), and why: an empty `reason` is that it has ended the process."""
        self._loop.remove_reader(worker.pipe.fileno())
        self._loop.remove_reader(worker.output)
        ending = worker.end(died=bool(status) and not reason)
        self._printed.read(worker)
        worker.close()
        calls = list(worker.calls.values())
        for call in calls:
            failed = CallFailed(status, reason or f"ended its process ({ending})")
            self._settle(worker, call, failed if status and len(calls) == 1 else CallLost(bool(status)))
        for call in worker.todo:
            if not call.answer.done():
                call.answer.set_exception(CallLost())
        worker.has_ended = True
        worker.calls.clear()
        new = self._workers[self._workers.index(worker)] = self._start_worker()
        self._listen_to(new)
        return ending

    def _fail(self, error: Exception) -> None:
        self._error = error
        under_way = [call for worker in self._workers for call in (*worker.calls.values(), *worker.todo)]
        for call in (*under_way, *self._todo):
            if not call.answer.done():
                call.answer.set_exception(error)
        for worker in self._workers:
            self._loop.remove_reader(worker.pipe.fileno())
