"""What a process of a pool does: it makes the calls that it is sent, plain ones one by one."""

from __future__ import annotations

import asyncio
import json
import os
import traceback
from collections.abc import Collection, Sequence
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from trainer.errors import describe_error, one_line
from trainer.import_utils import import_function
from trainer.sandbox.call_clock import CallClock
from trainer.sandbox.process_state import ProcessState


class Handler:
    """How the calls of a pool are made. A base class; each process makes one, with the arguments of the pool."""

    is_concurrent = False
    """`async` calls of different messages may be under way at the same time."""
    in_turn = False
    """`async` calls of one message are made one after another, and each is answered at once."""
    restores_process = False
    """After each call the process is what it was before, and a call that leaves a process running has failed."""

    must_end = False
    """The process must be replaced after its next answer: something runs in it that nothing else can end."""

    def is_async(self, call: list[Any]) -> bool:
        """Return whether `compute` returns an awaitable for this call."""
        return False

    def limit_s(self, call: list[Any]) -> float | None:
        """Return the longest time for an `async` call. None: it has a limit of its own."""
        return None

    def compute(self, call: list[Any]) -> Any:
        """Make the call; return JSON, or an awaitable of it. Whatever it raises fails the call."""
        raise NotImplementedError

    def describe(self, error: BaseException, call: list[Any]) -> str:
        """Return why the call has failed."""
        return f"raised {describe_error(error)}"


def line_of(error: BaseException, files: Collection[str]) -> str:
    """Return ` in FILE:LINE`, the last line of one of these source files that `error` has passed; "" if of none."""
    passed = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [(file, line) for file, line in passed if file in files]
    return f" in {one_line(os.path.basename(own[-1][0]))}:{own[-1][1]}" if own else ""


def send(pipe: Connection, message: Any) -> None:
    """Send `message` to the driver, as JSON."""
    pipe.send_bytes(json.dumps(message).encode())


def serve(pipe: Connection, handler: str, arguments: Sequence[Any], concurrency: int) -> NoReturn:
    """Answer messages `[number, calls]` until the pipe closes.

    Where calls of several messages may be under way, the first answer is `{"begun": number}`. It comes again while a
    call waits for something that does not count as its time (see `trainer.sandbox.call_clock`). Then follows
    `{"number": number, "results": [of the next calls], "last": whether this process answers no more}`, for each plain
    call, or for all `async` calls together, which run at the same time. `{"left": a process}` stands for the latter if
    one of several has left that process running.

    Args:
        handler: import path of a `Handler`.
        concurrency: `async` calls that run at the same time.
    """
    try:
        loop = asyncio.new_event_loop()
        made = import_function(handler, "handler")(*arguments)
    except BaseException as error:
        send(pipe, {"cannot_start": describe_error(error)})
        os._exit(1)
    _Server(pipe, made, loop, concurrency).run()


class _Server:
    def __init__(self, pipe: Connection, handler: Handler, loop: asyncio.AbstractEventLoop, concurrency: int):
        self._pipe = pipe
        self._handler = handler
        self._loop = loop
        self._slots = asyncio.Semaphore(concurrency)
        self._under_way: set[asyncio.Task[None]] = set()
        self._process = os.getpid()
        self._before = ProcessState(pipe) if handler.restores_process else None

    def run(self) -> NoReturn:
        self._loop.add_reader(self._pipe.fileno(), self._loop.stop)
        send(self._pipe, {"ready": self._handler.is_concurrent})
        while True:
            self._loop.run_forever()  # until there is a message. Plain calls are made while the loop does not run
            try:
                number, calls = json.loads(self._pipe.recv_bytes())
            except EOFError:
                os._exit(0)
            if self._handler.is_concurrent:
                send(self._pipe, {"begun": number})
            if self._handler.is_async(calls[0]):
                answer = self._answer_in_turn if self._handler.in_turn else self._answer_together
                task = self._loop.create_task(answer(number, calls))
                self._under_way.add(task)  # the loop itself holds no strong reference
                task.add_done_callback(self._under_way.discard)
            else:
                for call in calls:
                    self._answer(number, [self._compute(call)])

    def _compute(self, call: list[Any]) -> dict[str, Any]:
        try:
            return {"value": self._handler.compute(call)}
        except BaseException as error:  # also KeyboardInterrupt, SystemExit: whatever user code raises
            return {"raised": self._handler.describe(error, call)}

    async def _compute_async(self, number: int, call: list[Any]) -> dict[str, Any]:
        async with self._slots:
            clock = CallClock(self._handler.limit_s(call), lambda: send(self._pipe, {"begun": number}))
            try:
                async with clock:
                    return {"value": await self._handler.compute(call)}
            except BaseException as error:
                return {"timeout": True} if clock.is_over else {"raised": self._handler.describe(error, call)}

    async def _answer_together(self, number: int, calls: list[list[Any]]) -> None:
        results = await asyncio.gather(*(self._compute_async(number, call) for call in calls))
        self._answer_or_end(number, results)

    async def _answer_in_turn(self, number: int, calls: list[list[Any]]) -> None:
        for call in calls:
            self._answer_or_end(number, [await self._compute_async(number, call)])

    def _answer_or_end(self, number: int, results: list[dict[str, Any]]) -> None:
        try:
            self._answer(number, results)
        except OSError:  # user code has closed the pipe
            os._exit(1)

    def _answer(self, number: int, results: list[dict[str, Any]]) -> None:
        """Send results, and restore the process."""
        if os.getpid() != self._process:  # user code has forked, and this is its child
            os._exit(0)
        is_restored = self._before is None or self._before.restore()
        left = self._before.processes_left() if self._before is not None else ""
        if left and len(results) > 1:
            send(self._pipe, {"left": left})
            os._exit(0)
        if left and "value" in results[0]:
            reason = f"left a process running: {left}; start what must stay when the module is imported"
            results = [{"raised": reason}]
        is_last = bool(left) or not is_restored or self._handler.must_end
        send(self._pipe, {"number": number, "results": results, "last": is_last})
        if is_last:
            os._exit(0)
