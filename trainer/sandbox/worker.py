"""What a process of a pool does: it makes the calls that it is sent."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from trainer.errors import describe_error, one_line
from trainer.import_utils import import_function
from trainer.sandbox import limits

_CLOCK: ContextVar[CallClock | None] = ContextVar("clock", default=None)


class CallClock:
    """The clock of one call. A context manager, which ends the call after `limit_s` (None: never). `show_wait` is
    called when a wait that does not count begins (true) or ends, for whoever waits for the call."""

    def __init__(self, limit_s: float | None, show_wait: Callable[[bool], None]):
        self._limit = asyncio.timeout(limit_s)
        self._has_limit = limit_s is not None
        self._show_wait = show_wait
        self._waits = 0
        self._left_s = 0.0

    async def __aenter__(self) -> CallClock:
        await self._limit.__aenter__()
        _CLOCK.set(self)
        return self

    async def __aexit__(self, *exception: object) -> bool | None:
        self._has_limit = False  # what the call has left behind changes nothing any more
        return await self._limit.__aexit__(*exception)  # type: ignore[arg-type]

    @property
    def is_over(self) -> bool:
        return self._limit.expired()

    def pause(self) -> None:
        """Begin a wait that does not count. Waits may overlap."""
        self._waits += 1
        if self._waits == 1 and self._has_limit:
            when = self._limit.when()
            assert when is not None
            self._left_s = when - asyncio.get_running_loop().time()
            self._limit.reschedule(None)
            self._show_wait(True)

    def resume(self) -> None:
        self._waits -= 1
        if self._waits == 0 and self._has_limit:
            self._show_wait(False)
            self._limit.reschedule(asyncio.get_running_loop().time() + self._left_s)


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


class Handler:
    """How the calls of a pool are made. A base class; each process makes one, with the arguments of the pool."""

    is_concurrent = False  # calls of several sessions may be under way at the same time
    must_end = False
    """The process must be replaced after its next answer: something runs in it that nothing else can end."""

    def is_async(self, call: list[Any]) -> bool:
        return False

    def limit_s(self, call: list[Any]) -> float | None:
        """Return the longest time for an `async` call. None: it has a limit of its own."""
        return None

    def compute(self, call: list[Any]) -> Any:
        """Make the call; return JSON, or an awaitable of it. Whatever it raises fails the call."""
        raise NotImplementedError

    def describe(self, error: BaseException, call: list[Any]) -> str:
        return f"raised {describe_error(error)}"


def line_of(error: BaseException, files: Collection[str]) -> str:
    """Return ` in FILE:LINE`, the last line of one of these source files that `error` has passed; "" if of none."""
    passed = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [(file, line) for file, line in passed if file in files]
    return f" in {one_line(os.path.basename(own[-1][0]))}:{own[-1][1]}" if own else ""


def send(pipe: Connection, message: Any) -> None:
    pipe.send_bytes(json.dumps(message).encode())


class UserThreads:
    """Runs functions in threads. Nothing can end a thread: a function whose call is cancelled runs on."""

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

        def call() -> tuple[Any, BaseException | None]:
            """Return the value of the call and what it has raised: a future cannot hold a StopIteration."""
            try:
                return function(*arguments), None
            except BaseException as raised:  # whatever user code raises
                return None, raised

        thread = self._pool.submit(call)
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


def serve(pipe: Connection, handler: str, arguments: Sequence[Any]) -> NoReturn:
    """Answer messages `[number, call]` until the pipe closes. `[number, None]` ends an `async` call.

    The answer is `{"number": number, "last": whether this process answers no more}` with one of `value`, `raised` (why
    the call has failed) and `timeout`. When an `async` call begins or ends a wait that does not count as its time, a
    message `{"number": number, "waits": true or false}` comes before. `handler` is the import path of a `Handler`.
    """
    try:
        loop = asyncio.new_event_loop()
        made = import_function(handler, "handler")(*arguments)
    except BaseException as error:
        send(pipe, {"cannot_start": describe_error(error)})
        os._exit(1)
    _Server(pipe, made, loop).run()


class _Server:
    def __init__(self, pipe: Connection, handler: Handler, loop: asyncio.AbstractEventLoop):
        self._pipe = pipe
        self._handler = handler
        self._loop = loop
        self._under_way: dict[int, asyncio.Task[None]] = {}
        self._process = os.getpid()

    def run(self) -> NoReturn:
        self._loop.add_reader(self._pipe.fileno(), self._loop.stop)
        send(self._pipe, {"ready": self._handler.is_concurrent})
        while True:
            self._loop.run_forever()  # until there is a message. Plain calls are made while the loop does not run
            try:
                number, call = json.loads(self._pipe.recv_bytes())
            except EOFError:
                os._exit(0)
            if call is None:
                if number in self._under_way:
                    self._under_way[number].cancel()
            elif self._handler.is_async(call):
                self._under_way[number] = self._loop.create_task(self._answer_later(number, call))
            else:
                try:
                    result = {"value": self._handler.compute(call)}
                except BaseException as error:  # also KeyboardInterrupt, SystemExit: whatever user code raises
                    result = {"raised": self._handler.describe(error, call)}
                self._answer(number, result)

    async def _answer_later(self, number: int, call: list[Any]) -> None:
        clock = CallClock(
            self._handler.limit_s(call), lambda waits: send(self._pipe, {"number": number, "waits": waits})
        )
        try:
            async with clock:
                result = {"value": await self._handler.compute(call)}
        except BaseException as error:
            result = {"timeout": True} if clock.is_over else {"raised": self._handler.describe(error, call)}
        del self._under_way[number]
        try:
            self._answer(number, result)
        except OSError:  # user code has closed the pipe
            os._exit(1)

    def _answer(self, number: int, result: dict[str, Any]) -> None:
        if os.getpid() != self._process:  # user code has forked, and this is its child
            os._exit(0)
        is_last = self._handler.must_end
        send(self._pipe, {"number": number, "last": is_last, **result})
        if is_last:
            os._exit(0)
