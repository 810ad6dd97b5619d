"""Threads for user code that is not `async`, so that its waits hold nothing else in the process."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from trainer.sandbox import limits


class UserThreads:
    """Runs functions in threads. Nothing can end a thread: a function whose call is cancelled runs on."""

    def __init__(self, name: str):
        self._pool = ThreadPoolExecutor(limits.MAX_ASYNC_SESSIONS + limits.THREADS_LEFT, name)
        self._left: set[Future[Any]] = set()

    @property
    def too_many_left(self) -> bool:
        """Whether so many functions run on that the process must be replaced."""
        return len(self._left) >= limits.THREADS_LEFT

    async def run(
        self, function: Callable[..., Any], *arguments: Any, clean_up: Callable[[], object] | None = None
    ) -> Any:
        """Return what the function returns, or what the awaitable gives that it returns.

        Args:
            clean_up: called in the thread after a function whose call was cancelled.
        """
        thread = self._pool.submit(_returned_or_raised, function, arguments)
        try:
            value, error = await asyncio.wrap_future(thread)
        except asyncio.CancelledError:
            if thread.running():
                self._left.add(thread)
                thread.add_done_callback(lambda _: self._end_late(thread, clean_up))
            raise
        if error is not None:
            raise error
        return await value if inspect.isawaitable(value) else value

    def _end_late(self, thread: Future[Any], clean_up: Callable[[], object] | None) -> None:
        if clean_up is not None:
            with contextlib.suppress(BaseException):  # whatever user code raises
                clean_up()
        self._left.discard(thread)


def _returned_or_raised(function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Any, BaseException | None]:
    """Call the function; return its value and what it has raised: a future cannot hold a StopIteration."""
    try:
        return function(*arguments), None
    except BaseException as error:  # whatever user code raises
        return None, error
