"""Threads for user code that is not `async`, so that its waits hold nothing else in the process."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
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
        self,
        function: Callable[..., Any],
        *arguments: Any,
        given_up: Callable[[], object] = lambda: None,
        late: Callable[[Any], object] = lambda value: None,
    ) -> Any:
        """Return what the function returns, or what the awaitable gives that it returns.

        Args:
            given_up: called at once if the call is cancelled after the function has begun. Then `late` is called, too.
            late: called in a thread when the function has ended, with what it has returned, or None. What it returns
                may be awaitable.
        """
        call = _Call(function, arguments, late, asyncio.get_running_loop())
        thread = self._pool.submit(call.run)
        try:
            value, error = await asyncio.wrap_future(thread)
        except asyncio.CancelledError:
            if thread.cancelled():  # it had not begun
                raise
            given_up()
            if call.give_up():
                self._left.add(thread)
                thread.add_done_callback(self._left.discard)
            else:
                self._pool.submit(call.end_late)
            raise
        if error is not None:
            raise error
        return await value if inspect.isawaitable(value) else value


class _Call:
    """One call of a function in a thread."""

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        late: Callable[[Any], object],
        loop: asyncio.AbstractEventLoop,
    ):
        self._function = function
        self._arguments = arguments
        self._late = late
        self._loop = loop
        self._lock = threading.Lock()
        self._value: Any = None
        self._has_ended = self._is_given_up = False

    def run(self) -> tuple[Any, BaseException | None]:
        """Call the function; return its value and what it has raised: a future cannot hold a StopIteration."""
        error = None
        try:
            self._value = self._function(*self._arguments)
        except BaseException as raised:  # whatever user code raises
            error = raised
        with self._lock:
            self._has_ended = True
        if self._is_given_up:
            self.end_late()
        return self._value, error

    def give_up(self) -> bool:
        """Note that nobody takes the value. Return whether the function still runs: its thread then ends it."""
        with self._lock:
            self._is_given_up = not self._has_ended
        return self._is_given_up

    def end_late(self) -> None:
        """Do what is to be done when the function of a call that was given up has ended."""
        with contextlib.suppress(BaseException):  # whatever user code raises
            done = self._late(self._value)
            if inspect.isawaitable(done):
                asyncio.run_coroutine_threadsafe(_awaited(done), self._loop)


async def _awaited(value: Any) -> None:
    with contextlib.suppress(Exception):
        await value
