"""The event loop of the rollouts: it runs on a thread of the driver, while the main thread trains or waits for it."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from trainer.process import time_limits
from trainer.process.signals import SIGNALS

T = TypeVar("T")
PhaseTimer = Callable[[str], AbstractContextManager[None]]  # times a block as a phase of the step


class EventLoop:
    """An event loop on a thread of its own.

    The thread that has made it, the main thread, calls `run`, `call` and `close`. While it waits in `run`, it does what
    coroutines ask of it with `on_main`: the ranks, for example, may be used on this thread alone.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._waits = 0
        self._main = threading.get_ident()
        self.phase = ""
        """What the rollouts do now, as a phase of a step (see `run`). Set on the loop, by `set_phase`."""
        self._thread = threading.Thread(target=self._run, name="rollouts", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.create_task(self._pass_safe_points())
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    async def _pass_safe_points(self) -> None:
        """Show that this thread is alive: the main thread, which waits for it, makes progress only as long as it is."""
        while True:
            SIGNALS.check()
            await asyncio.sleep(time_limits.POLL_INTERVAL_S)

    @property
    def is_waited_for(self) -> bool:
        """Whether the main thread waits in `run`."""
        return self._waits > 0

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function on the loop; return its result."""

        async def call() -> T:
            return function(*arguments)

        return self.run(call())

    def post(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._loop.call_soon_threadsafe(function, *arguments)

    def run(self, coroutine: Coroutine[Any, Any, T], timer: PhaseTimer | None = None) -> T:
        """Run a coroutine; wait for its result. It is cancelled if a signal ends the wait.

        Args:
            timer: times the wait, by phases (see `set_phase`). None: it is not timed.
        """
        assert threading.get_ident() == self._main, "another thread"
        if not self._thread.is_alive():
            coroutine.close()
            raise RuntimeError("the event loop has ended")
        future = self.start(coroutine)
        future.add_done_callback(lambda _: self._jobs.put(None))
        self._waits += 1
        try:
            while not future.done():
                phase = self.phase
                with timer(phase) if timer is not None and phase else contextlib.nullcontext():
                    while not future.done() and (timer is None or self.phase == phase):
                        SIGNALS.check_behind()
                        with contextlib.suppress(queue.Empty):
                            job = self._jobs.get(timeout=time_limits.POLL_INTERVAL_S)
                            if job is not None:
                                job()
        except BaseException:
            future.cancel()
            raise
        finally:
            self._waits -= 1
        return future.result()

    def set_phase(self, phase: str) -> None:
        if phase != self.phase:
            self.phase = phase
            self._jobs.put(None)

    async def on_main(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function on the main thread, as soon as that waits in `run`; return its result."""
        done: Future[T] = Future()

        def job() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                done.set_result(function(*arguments))
            except Exception as error:
                done.set_exception(error)
            except BaseException as error:
                done.set_exception(error)
                raise

        self._jobs.put(job)
        return await asyncio.wrap_future(done)

    def close(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(time_limits.LOOP_END_S)


async def in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function that blocks, on a thread that does not keep the process from its end; return its result."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(function(*arguments))
        except BaseException as error:
            done.set_exception(error)

    done.set_running_or_notify_cancel()  # it cannot be cancelled any more
    threading.Thread(target=run, name="engine call", daemon=True).start()
    return await asyncio.wrap_future(done)


class Changes:
    """Lets coroutines wait until something is true. Whoever changes what they wait for calls `notify`."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []

    def notify(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    async def until(self, is_true: Callable[[], bool]) -> None:
        """Wait until `is_true()`."""
        while not is_true():
            future = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
            await future


async def all_of(coroutines: list[Awaitable[T]]) -> list[T]:
    """Return the results of all coroutines. If one fails, the others are cancelled, and have ended before it raises."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
