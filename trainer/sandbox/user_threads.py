"""Threads for user code that is not `async`, so that its waits hold nothing else in the process."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from trainer.sandbox import limits


class UserThreads:
    """Runs functions in threads. Nothing can end a thread: a function whose call is cancelled runs on.

    Args:
        several: functions may run at the same time. Else one after another, in one thread.
    """

    def __init__(self, name: str, several: bool = True):
        self._pool = ThreadPoolExecutor(limits.MAX_ASYNC_SESSIONS + limits.THREADS_LEFT if several else 1, name)
        self._most_left = limits.THREADS_LEFT if several else 1
        self._left: set[Future[Any]] = set()

    @property
    def too_many_left(self) -> bool:
        """Whether so many functions run on that the process must be replaced."""
        return len(self._left) >= self._most_left

    async def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return what the function returns, or what the awaitable gives that it returns."""
        thread = self._pool.submit(_outcome, function, arguments)
        try:
            value, error = await asyncio.wrap_future(thread)
        except asyncio.CancelledError:
            if not thread.cancelled():  # it had begun
                self._left.add(thread)
                thread.add_done_callback(self._left.discard)
            raise
        if error is not None:
            raise error
        return await value if inspect.isawaitable(value) else value


def _outcome(function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Any, BaseException | None]:
    """Return the value of a call and what it has raised: a future cannot hold a StopIteration."""
    try:
        return function(*arguments), None
    except BaseException as raised:  # whatever user code raises
        return None, raised
