"""The time that an `async` call of a process may take, and the waits that do not count towards it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

_CLOCK: ContextVar[CallClock | None] = ContextVar("clock", default=None)
_SIGN_S = 0.5
"""Shortest time between two signs of life."""


class CallClock:
    """The clock of one call. A context manager, which ends the call when its time is over.

    Args:
        limit_s: seconds that the call may take. None: it has no limit.
        show_life: called again and again while a wait does not count, so that whoever waits for the call knows.
    """

    def __init__(self, limit_s: float | None, show_life: Callable[[], None]):
        self._limit = asyncio.timeout(limit_s)
        self._sign_s = max(_SIGN_S, (limit_s or 0.0) / 2)
        self._show_life = show_life
        self._waits = 0
        self._left_s = 0.0
        self._sign: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> CallClock:
        await self._limit.__aenter__()
        _CLOCK.set(self)
        return self

    async def __aexit__(self, *exception: object) -> bool | None:
        self._waits = -1  # what the call has left behind changes nothing any more
        self._end_signs()
        return await self._limit.__aexit__(*exception)  # type: ignore[arg-type]

    @property
    def is_over(self) -> bool:
        """Whether the call has taken too long."""
        return self._limit.expired()

    def pause(self) -> None:
        """Begin a wait that does not count."""
        when = self._limit.when()
        if self._waits < 0 or self._waits == 0 and when is None:
            return
        self._waits += 1
        if self._waits == 1:
            assert when is not None
            self._left_s = when - asyncio.get_running_loop().time()
            self._limit.reschedule(None)
            self._show()

    def resume(self) -> None:
        """End a wait."""
        if self._waits <= 0:
            return
        self._waits -= 1
        if self._waits == 0:
            self._end_signs()
            self._show_life()
            self._limit.reschedule(asyncio.get_running_loop().time() + self._left_s)

    def _show(self) -> None:
        self._show_life()
        self._sign = asyncio.get_running_loop().call_later(self._sign_s, self._show)

    def _end_signs(self) -> None:
        if self._sign is not None:
            self._sign.cancel()
            self._sign = None


@contextlib.contextmanager
def uncounted() -> Iterator[None]:
    """Do not count the seconds of the block towards the limit of the call that is made, such as a wait for its turn."""
    clock = _CLOCK.get()
    if clock is None:
        yield
        return
    clock.pause()
    try:
        yield
    finally:
        clock.resume()
