"""The time of a call, and waits that do not count."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from trainer.sandbox import worker
from trainer.sandbox.worker import CallClock, uncounted


def awaited(test: Callable[..., Any]) -> Callable[..., None]:
    """A test as a coroutine."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


async def timed(call: Callable[[], Awaitable[str]], limit_s: float | None = 0.1) -> tuple[str, int]:
    """Return what a call gives, or `over`, and the number of its signs of life."""
    signs: list[None] = []
    clock = CallClock(limit_s, lambda: signs.append(None))
    try:
        async with clock:
            return await call(), len(signs)
    except TimeoutError:
        assert clock.is_over
        return "over", len(signs)


async def wait(seconds: float = 0.3) -> str:
    with uncounted():
        await asyncio.sleep(seconds)
    return "done"


@awaited
async def test_a_wait_does_not_count(monkeypatch):
    monkeypatch.setattr(worker, "_SIGN_S", 0.01)
    result, signs = await timed(wait)
    assert result == "done" and signs > 2


@awaited
async def test_what_follows_a_wait_counts():
    async def call() -> str:
        await wait(0.01)
        await asyncio.sleep(1000)
        return "done"

    result, signs = await timed(call)
    assert result == "over" and signs >= 2, "at the beginning and the end of the wait"


@awaited
async def test_waits_may_overlap():
    async def call() -> str:
        await asyncio.gather(wait(1.6), wait(1.8))
        return "done"

    assert (await timed(call, limit_s=1.5))[0] == "done"


@awaited
async def test_a_call_without_a_limit_shows_no_life():
    assert await timed(lambda: wait(0.001), limit_s=None) == ("done", 0)


@awaited
async def test_what_a_call_leaves_behind_shows_no_life(monkeypatch):
    monkeypatch.setattr(worker, "_SIGN_S", 0.001)
    left: list[asyncio.Task[str]] = []

    async def call() -> str:
        left.append(asyncio.create_task(wait(0.1)))
        await asyncio.sleep(0)
        return "done"

    signs: list[None] = []
    async with CallClock(1000.0, lambda: signs.append(None)):
        await call()
    before = len(signs)
    assert await left[0] == "done" and len(signs) == before


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
