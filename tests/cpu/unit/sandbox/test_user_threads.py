"""Functions of users in threads: what they return and raise, and what becomes of those that nobody waits for."""

from __future__ import annotations

import asyncio
import queue
import threading
from typing import Any

import pytest

from trainer.sandbox import limits
from trainer.sandbox.worker import UserThreads


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
    event = threading.Event()

    def wait() -> None:
        begun.put(None)
        event.wait(60)

    async def cancel(threads: UserThreads, verdicts: list[bool]) -> None:
        assert await threads.run(abs, -1) == 1
        for are_too_many in verdicts:
            call = asyncio.ensure_future(threads.run(wait))
            await asyncio.to_thread(begun.get, timeout=60)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert threads.too_many_left is are_too_many
        event.set()
        while threads._left:
            await asyncio.sleep(0.01)
        assert not threads.too_many_left

    asyncio.run(cancel(UserThreads("test"), [False, True]))
    event.clear()
    asyncio.run(cancel(UserThreads("test", several=False), [True]))
