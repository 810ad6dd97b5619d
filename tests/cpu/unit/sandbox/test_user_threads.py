"""Functions of users in threads: what they return and raise, and what becomes of those that nobody waits for."""

from __future__ import annotations

import asyncio
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from trainer.sandbox import limits
from trainer.sandbox.user_threads import UserThreads


def test_functions_run_at_the_same_time():
    barrier = threading.Barrier(3)

    async def together() -> list[Any]:
        threads = UserThreads("test")
        return await asyncio.gather(*(threads.run(barrier.wait, 60) for _ in range(3)))

    assert sorted(asyncio.run(together())) == [0, 1, 2]


def test_what_a_function_returns_may_be_awaitable():
    async def double(number: int) -> int:
        return 2 * number

    assert asyncio.run(UserThreads("test").run(double, 21)) == 42


@pytest.mark.parametrize(("error", "raised"), [(ValueError, ValueError), (SystemExit, SystemExit),
                                               (StopIteration, RuntimeError)])  # fmt: skip
def test_what_a_function_raises_is_raised(error, raised):
    """Python has coroutines raise a RuntimeError in place of a StopIteration."""

    def fail() -> None:
        raise error("no")

    async def call() -> None:
        with pytest.raises(raised):
            await UserThreads("test").run(fail)

    asyncio.run(call())


def test_functions_whose_calls_were_cancelled_count_until_they_end(monkeypatch):
    monkeypatch.setattr(limits, "THREADS_LEFT", 2)
    begun: queue.SimpleQueue[None] = queue.SimpleQueue()
    cleaned: list[threading.Thread] = []
    event = threading.Event()

    def wait() -> None:
        begun.put(None)
        event.wait(60)

    def clean_up(value: Any) -> None:
        cleaned.append(threading.current_thread())
        assert value is None
        raise SystemExit

    async def cancel() -> None:
        threads = UserThreads("test")
        assert await threads.run(abs, -1, late=clean_up) == 1
        for are_too_many in (False, True):
            call = asyncio.ensure_future(threads.run(wait, late=clean_up))
            await asyncio.to_thread(begun.get, timeout=60)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert threads.too_many_left is are_too_many
        assert cleaned == []
        event.set()
        while threads._left:
            await asyncio.sleep(0.01)
        assert not threads.too_many_left
        assert len(cleaned) == 2 and threading.main_thread() not in cleaned

    asyncio.run(cancel())


def test_a_value_that_comes_too_late_is_given_back():
    """Whether its function runs on or has just ended. What takes it back may be `async`."""
    taken: queue.SimpleQueue[tuple[int, bool]] = queue.SimpleQueue()
    gone: list[bool] = []

    async def take(value: int, in_main: bool) -> None:
        taken.put((value, in_main))

    def late(value: int) -> Any:
        return take(value, threading.current_thread() is threading.main_thread())

    async def cancel(runs_on: bool) -> None:
        begun, end = threading.Event(), threading.Event()

        def make() -> int:
            begun.set()
            end.wait(60)
            return 7

        threads = UserThreads("test")
        call = asyncio.ensure_future(threads.run(make, late=late, given_up=lambda: gone.append(True)))
        await asyncio.sleep(0)
        assert begun.wait(60)
        if not runs_on:
            end.set()
            threads._pool.shutdown(wait=True)  # the function has ended, and the loop does not know it yet
            threads._pool = ThreadPoolExecutor(1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        end.set()
        assert await asyncio.to_thread(taken.get, timeout=60) == (7, False)

    for runs_on in (True, False):
        asyncio.run(cancel(runs_on))
    assert gone == [True, True]
