"""Spans: what the processes of a job do, and when, for the timeline (`logger.trace`).

`with TRACER.span("export"):` records the block as a span of this process. While tracing is off, that is nearly free.
The workers of a job keep their spans until they answer the driver's next call, so tracing needs no calls of its own.

Spans are measured on the monotonic clock, which all processes of a machine share. The clock of another machine is
compared with that of the driver by the calls themselves (see `ClockOffset`).
"""

from __future__ import annotations

import functools
import math
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

DRIVER, MAIN = "driver", "main"
"""The process and the row of spans that name no other."""
OVERLAPPING = "calls*"
"""A row of calls that may overlap."""
WANTED = "_trainer_spans"
"""A call with this argument asks for the spans of its worker. No method of a worker has an argument of this name."""
_MOST_SPANS = 100_000  # kept by a process that nobody asks; the oldest are dropped
_DRIFT_S = 60.0  # crystals drift apart by up to 50 us a second: older comparisons are forgotten
_OFF: AbstractContextManager[None] = nullcontext()
_THREAD = threading.local()


class Span(NamedTuple):
    """What a process did for a while."""

    process: str
    """Such as `driver`, `rank 0`, `engine 1`. Empty: the process that records it."""
    row: str
    """Spans of a row follow one another or nest. With `*` at the end they may overlap, and take several rows."""
    name: str
    start: float
    """Seconds of the driver's monotonic clock; in another process, of its own."""
    end: float
    details: Mapping[str, Any]


class Tracer:
    """The spans of this process. Thread-safe. One object serves the process: `TRACER`."""

    def __init__(self) -> None:
        self.is_on = False
        self.offsets: dict[str, ClockOffset] = {}
        """Of the clocks of other machines, by their names."""
        self.clocks: dict[str, str] = {}
        """The name of the clock of each process on another machine."""
        self.owner: Any = None
        """What writes the spans, in a driver."""
        self._spans: deque[Span] = deque(maxlen=_MOST_SPANS)

    def span(self, name: str, row: str = "", **details: Any) -> AbstractContextManager[None]:
        """Record the block as a span, even if it raises.

        Args:
            row: empty: that of the thread.
        """
        return _Running(self, name, row, details) if self.is_on else _OFF

    def add(self, name: str, start: float, end: float, row: str = "", process: str = "", **details: Any) -> None:
        """Record a span that was measured with `time.monotonic`."""
        if self.is_on:
            self._spans.append(Span(process, row or _row_of_thread(), name, start, end, details))

    def take(self) -> list[Span]:
        """Return the spans since the last call."""
        spans = []
        with suppress(IndexError):  # there is no other; threads that take at the same time share them
            while True:
                spans.append(self._spans.popleft())
        return spans

    def receive(self, process: str, sent_at: float, answer: Any) -> Any:
        """Return the result in the answer of a worker's call, and record the spans that came with it.

        Args:
            sent_at: before the call was sent.
        """
        if not isinstance(answer, Answer):
            return answer
        offset = 0.0
        if answer.clock != clock_name():
            self.clocks[process] = answer.clock
            known = self.offsets.setdefault(answer.clock, ClockOffset())
            known.update(sent_at, answer.received_at, answer.answered_at, time.monotonic())
            offset = known.seconds
        for span in answer.spans:
            self._spans.append(span._replace(process=process, start=span.start - offset, end=span.end - offset))
        return answer.result

    def clock_error_s(self, process: str) -> float:
        """Return by how much the times of a process may be wrong; 0 on the machine of the driver."""
        return self.offsets[self.clocks[process]].error_s if process in self.clocks else 0.0


class _Running:
    """A span that has begun."""

    __slots__ = ("_details", "_name", "_row", "_start", "_tracer")

    def __init__(self, tracer: Tracer, name: str, row: str, details: Mapping[str, Any]):
        self._tracer, self._name, self._row, self._details = tracer, name, row, details

    def __enter__(self) -> None:
        self._start = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._tracer.add(self._name, self._start, time.monotonic(), self._row, **self._details)


TRACER = Tracer()


def _row_of_thread() -> str:
    row = getattr(_THREAD, "row", "")
    return row or (MAIN if threading.current_thread() is threading.main_thread() else "threads*")


@dataclass(frozen=True)
class Answer:
    """The result of a call that has asked for spans."""

    result: Any
    spans: list[Span]
    clock: str
    """The name of the worker's clock."""
    received_at: float
    answered_at: float


def answer_call(function: Callable[..., Any], row: str, args: tuple, kwargs: dict[str, Any], name: str) -> Any:
    """Make a call in a worker. Return its result, in an `Answer` with the spans of the process if it asks for them.

    Args:
        row: of the thread that makes the calls.
        name: of the method.
    """
    TRACER.is_on = kwargs.pop(WANTED, False)
    if not TRACER.is_on:
        return function(*args, **kwargs)
    received_at, _THREAD.row = time.monotonic(), row
    with TRACER.span(call_name(name, args)):
        result = function(*args, **kwargs)
    return Answer(result, TRACER.take(), clock_name(), received_at, time.monotonic())


def call_name(method: str, args: tuple) -> str:
    """Return what a call is called in the timeline, such as `policy update`."""
    words = map(str, args[:2]) if method == "call" else [{"step": "generate", "ask": "files"}.get(method, method)]
    return " ".join(words).replace("_", " ")  # `call` is of a role of a rank


@functools.cache
def clock_name() -> str:
    """Return a name that processes have in common if they share a monotonic clock."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/time')}"
    except OSError:
        return socket.gethostname()


class ClockOffset:
    """By how many seconds the clock of another machine is ahead of this one, as calls show it.

    A call is sent at s and its answer arrives at r, here. There, it is received at a and answered at b. So the offset
    lies between b - r and a - s. Quick calls leave little room; the bounds of many are combined. As clocks drift apart,
    only those of the last minute or two count.
    """

    def __init__(self) -> None:
        self._since = -math.inf
        self._bounds = self._before = (-math.inf, math.inf)

    def update(self, sent_at: float, received_at: float, answered_at: float, arrived_at: float) -> None:
        """Take a call into account. The first and the last time are of this machine, the others of the other one."""
        if arrived_at > self._since + _DRIFT_S:
            self._since, self._before, self._bounds = arrived_at, self._bounds, (-math.inf, math.inf)
        low, high = self._bounds
        self._bounds = max(low, answered_at - arrived_at), min(high, received_at - sent_at)

    @property
    def seconds(self) -> float:
        """The offset: the middle between the bounds."""
        low, high = self._tightest()
        return (low + high) / 2

    @property
    def error_s(self) -> float:
        """By how much `seconds` can be wrong."""
        low, high = self._tightest()
        return (high - low) / 2

    def _tightest(self) -> tuple[float, float]:
        low, high = max(self._bounds[0], self._before[0]), min(self._bounds[1], self._before[1])
        return (low, high) if low <= high else self._bounds  # the clock was set, or drifts more than we think
