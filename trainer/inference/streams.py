"""Answers of HTTP that take long: lines, and empty lines while there is nothing to say."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from trainer.generation.server_protocol import ALIVE_S


async def with_signs_of_life(lines: AsyncIterator[bytes], every_s: float = ALIVE_S) -> AsyncIterator[bytes]:
    """Yield the lines, and an empty line whenever none has come for `every_s`."""
    waiting: asyncio.Future[bytes] | None = None
    try:
        while True:
            waiting = asyncio.ensure_future(anext(lines))
            while not (await asyncio.wait([waiting], timeout=every_s))[0]:
                yield b"\n"
            try:
                line, waiting = waiting.result(), None
            except StopAsyncIteration:
                return
            yield line
    finally:
        if waiting is not None:
            waiting.cancel()
            with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration, Exception):
                await waiting
        await lines.aclose()  # type: ignore[attr-defined]
