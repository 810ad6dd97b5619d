"""What a pool of processes does: tasks, and the rounds in which they are submitted."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from trainer.process.signals import SIGNALS
from trainer.sandbox import limits


class Task:
    """Work for the processes of a pool. A base class."""

    kind: Any = None
    """Tasks of the same kind may travel in one message."""
    limit: tuple[str, float] | None = None
    """Key and value of the longest time for one call. None: those of the pool."""
    is_session = False
    """All calls must be made by the same process. If it is lost, the session begins again in another."""
    is_async = False
    is_urgent = False
    """Its calls, which are `async`, are sent before all others, whatever the process does."""
    retried: frozenset[str] = frozenset({"died"})
    """Failures after which the task is tried again: `died`, `timeout`, `raised`."""

    def __init__(self) -> None:
        self.round: Round | None = None
        """The round that it was submitted to last."""
        self.failures = 0
        self.run_isolated = False
        """It gets a process for itself: one of several tasks that ran at the same time was bad."""
        self.worker: Any = None
        """The process of a session."""
        self.on_rest: Callable[[Any], None] | None = None
        """Gets this task, on the thread of the pool, when that has no more to do for it."""

    def next_call(self) -> list[Any] | None:
        """Return the next call, for `Handler.compute`; None: there is nothing to do."""
        raise NotImplementedError

    @property
    def label(self) -> str:
        """What the next call is called in the timeline."""
        return "call"

    def take(self, value: Any) -> bool:
        """Take what the call has returned. Return whether that counts as a failure.

        Raises:
            ProcessDied: it cannot be from the handler: user code wrote into the pipe.
        """
        raise NotImplementedError

    def fail(self, status: str, reason: str) -> None:
        """Fail the task for good."""
        raise NotImplementedError

    def rest(self) -> None:
        """Called on the thread of the pool when it has no more to do for the task, until that is submitted again."""
        if self.on_rest is not None:
            self.on_rest(self)

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
    """Tasks that a pool does while the block of `WorkerPool.round` runs. It belongs to one thread.

    Args:
        wake: lets the pool look at the round.
        log_output: logs what the processes have printed.
    """

    def __init__(self, wake: Callable[[], None], log_output: Callable[[], None]):
        self._wake = wake
        self._log_output = log_output
        self._inbox: queue.SimpleQueue[Sequence[Task]] = queue.SimpleQueue()
        self.is_open = True
        """More tasks may follow."""
        self.is_cancelled = False
        self.ended: Future[None] = Future()
        """Done when the pool does nothing more for the round."""
        self.error: BaseException | None = None
        """What ends the round; known before the tasks that are left rest, so that nobody takes them for failed."""
        self.since = time.monotonic()
        self.lost_s = 0.0
        """Seconds that the processes have spent on its failed calls."""

    def submit(self, tasks: Sequence[Task]) -> None:
        """Begin to do tasks.

        Raises:
            WorkerError: the processes cannot start.
        """
        self.check()
        for task in tasks:
            task.round = self
        self._inbox.put(tasks)
        self._wake()

    def check(self) -> None:
        """Raise the failure that has ended the round.

        Raises:
            WorkerError: the processes cannot start.
        """
        if self.error is not None:
            raise self.error
        if self.ended.done():
            self.ended.result()

    def wait(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Wait until all tasks are done or have failed. No others can follow.

        Args:
            meanwhile: called twice a second.

        Raises:
            WorkerError: the processes cannot start.
        """
        self.is_open = False
        self._wake()
        with SIGNALS.waiting():
            while not self.ended.done():  # not in one wait, which signals could not interrupt
                concurrent.futures.wait([self.ended], 0.5)
                meanwhile()
        self.ended.result()
        self._log_output()

    async def done(self) -> None:
        """Wait on an event loop until all tasks are done or have failed (see `wait`)."""
        self.is_open = False
        self._wake()
        await asyncio.shield(asyncio.wrap_future(self.ended))  # a wait that is cancelled leaves the round alone
        self._log_output()

    def received(self) -> Iterator[Task]:
        """Yield the tasks that were submitted since the last call."""
        with contextlib.suppress(queue.Empty):
            while True:
                yield from self._inbox.get_nowait()


class AsyncCalls:
    """The tasks of a round, on an event loop."""

    def __init__(self, tasks: Round):
        self._round = tasks
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[Task, asyncio.Future[None]] = {}
        self._new: list[Task] = []
        tasks.ended.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._check))

    async def do(self, task: Task) -> None:
        """Do a task: it has its results then, or has failed. A session has answered all that it was asked.

        Raises:
            WorkerError: the processes cannot start.
        """
        done = self._waiting[task] = self._loop.create_future()
        task.on_rest = self._note_rest
        self.submit(task)
        try:
            await done
        finally:
            self._waiting.pop(task, None)

    def submit(self, task: Task) -> None:
        """Begin to do a task, with all that others submit in this turn of the loop."""
        self._new.append(task)
        if len(self._new) == 1:
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        new, self._new = self._new, []
        try:
            self._round.submit(new)
        except Exception as error:
            self._fail(error)

    async def end(self) -> None:
        """Wait until all tasks are done. No others can follow."""
        self._flush()
        await self._round.done()

    def _note_rest(self, task: Task) -> None:
        self._loop.call_soon_threadsafe(self._rested, task)

    def _rested(self, task: Task) -> None:
        if self._round.error is not None:
            self._fail(self._round.error)
        elif (done := self._waiting.get(task)) is not None and not done.done():
            done.set_result(None)

    def _check(self) -> None:
        try:
            self._round.check()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        for done in self._waiting.values():
            if not done.done():
                done.set_exception(error)
