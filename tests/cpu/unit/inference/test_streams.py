"""Lines that take long show that the server lives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from trainer.inference.streams import with_signs_of_life


async def collect(lines: AsyncIterator[bytes]) -> list[bytes]:
    return [line async for line in with_signs_of_life(lines, 0.01)]


def test_empty_lines_come_while_a_line_is_awaited():
    go_on = asyncio.Event()

    async def lines() -> AsyncIterator[bytes]:
        yield b"1\n"
        await go_on.wait()
        yield b"2\n"

    async def run() -> list[bytes]:
        found = []
        async for line in with_signs_of_life(lines(), 0.01):
            found.append(line)
            if found.count(b"\n") == 3:
                go_on.set()
        return found

    found = asyncio.run(run())
    assert found[:4] == [b"1\n", b"\n", b"\n", b"\n"] and found[-1] == b"2\n"


def test_an_error_of_the_lines_is_raised_and_the_lines_are_closed():
    closed = []

    async def lines() -> AsyncIterator[bytes]:
        try:
            yield b"1\n"
            raise ValueError("broken")
        finally:
            closed.append(True)

    with pytest.raises(ValueError, match="broken"):
        asyncio.run(collect(lines()))
    assert closed
