"""The time of a call, and waits that do not count."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from trainer.sandbox.worker import CallClock, uncounted


def awaited(test: Callable[..., Any]) -> Callable[..., None]:
    """A test as a coroutine."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


async def timed(call: Callable[[], Awaitable[str]], limit_s: float | None = 0.1) -> tuple[str, list[bool]]:
    """Return what a call gives, or `over`, and what its clock has shown."""
    shown: list[bool] = []
    clock = CallClock(limit_s, shown.append)
    try:
        async with clock:
            return await call(), shown
    except TimeoutError:
        assert clock.is_over
        return "over", shown


async def wait(seconds: float = 0.3) -> str:
    with uncounted():
        await asyncio.sleep(seconds)
    return "done"


@awaited
async def test_a_wait_does_not_count_and_what_follows_it_does():
    assert await timed(wait) == ("done", [True, False])

    async def call() -> str:
        await wait(0.01)
        await asyncio.sleep(1000)
        return "done"

    assert await timed(call) == ("over", [True, False])


@awaited
async def test_waits_may_overlap():
    async def call() -> str:
        await asyncio.gather(wait(1.6), wait(1.8))
        return "done"

    assert await timed(call, limit_s=1.5) == ("done", [True, False])


@awaited
async def test_a_call_without_a_limit_shows_no_wait():
    assert await timed(lambda: wait(0.001), limit_s=None) == ("done", [])


@awaited
async def test_what_a_call_leaves_behind_shows_no_wait():
    left: list[asyncio.Task[str]] = []

    async def call() -> str:
        left.append(asyncio.create_task(wait(0.1)))
        await asyncio.sleep(0)
        return "done"

    _, shown = await timed(call, limit_s=1000.0)
    assert await left[0] == "done" and shown == [True]


@awaited
async def test_waits_outside_of_calls_are_free():
    assert await wait(0.001) == "done"


@awaited
async def test_a_wait_that_fails_has_ended():
    async def call() -> str:
        with pytest.raises(OSError), uncounted():
            raise OSError
        await asyncio.sleep(1000)
        return "done"

    assert (await timed(call))[0] == "over"
