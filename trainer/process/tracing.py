"""Spans: what the processes of a job do, and when, for the timeline (`logger.trace`).

`with TRACER.span("export"):` records the block as a span of this process. While tracing is off, that is nearly free.
The workers of a job keep their spans until they answer the driver's next call, so tracing needs no calls of its own.

Spans are measured on the monotonic clock, which all processes of a machine share. The spans of another machine are
moved by the difference of the times of day, so their times are as good as the clocks of the machines agree.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

DRIVER, MAIN = "driver", "main"
"""The process and the row of spans that name no other."""
OVERLAPPING = "calls*"  # a row of calls that may overlap
WANTED = "_trainer_spans"
"""A call with this argument asks for the spans of its worker. No method of a worker has an argument of this name."""
_MOST_SPANS = 100_000  # kept by a process that nobody asks; the oldest are dropped
_SAME_CLOCK_S = 0.001  # two processes of a machine read its clocks within this time
_OFF: AbstractContextManager[None] = nullcontext()
_THREAD = threading.local()


class Span(NamedTuple):
    """What a process did for a while."""

    process: str
    """Such as `driver`, `rank 0`, `engine 1`. Empty: the process that records it."""
    row: str
    """Spans of a row follow one another or nest. With `*` at the end they may overlap, and take several rows."""
    name: str
    start: float  # seconds of the driver's monotonic clock; in another process, of its own
    end: float
    details: Mapping[str, Any]


class Tracer:
    """The spans of this process. Thread-safe. One object serves the process: `TRACER`."""

    def __init__(self) -> None:
        self.is_on = False
        self._spans: deque[Span] = deque(maxlen=_MOST_SPANS)

    def span(self, name: str, row: str = "", **details: Any) -> AbstractContextManager[None]:
        """Record the block as a span, even if it raises. An empty `row` is that of the thread."""
        return self._recording(name, row, details) if self.is_on else _OFF

    @contextmanager
    def _recording(self, name: str, row: str, details: Mapping[str, Any]) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self.add(name, start, time.monotonic(), row, **details)

    def add(self, name: str, start: float, end: float, row: str = "", process: str = "", **details: Any) -> None:
        """Record a span that was measured with `time.monotonic`."""
        if self.is_on:
            is_main = threading.current_thread() is threading.main_thread()
            row = row or getattr(_THREAD, "row", "") or (MAIN if is_main else "threads*")
            self._spans.append(Span(process, row, name, start, end, details))

    def take(self) -> list[Span]:
        """Return the spans since the last call."""
        spans = []
        with suppress(IndexError):  # there is no other; threads that take at the same time share them
            while True:
                spans.append(self._spans.popleft())
        return spans

    def receive(self, process: str, answer: Any) -> Any:
        """Return the result in the answer of a worker's call, and record the spans that came with it."""
        if not isinstance(answer, Answer):
            return answer
        shift = answer.boot_time - boot_time()
        shift = shift if abs(shift) > _SAME_CLOCK_S else 0.0
        for span in answer.spans:
            self._spans.append(span._replace(process=process, start=span.start + shift, end=span.end + shift))
        return answer.result


TRACER = Tracer()


@dataclass(frozen=True)
class Answer:
    """The result of a call that has asked for spans."""

    result: Any
    spans: list[Span]
    boot_time: float  # the time of day, in seconds, at which the monotonic clock of the worker was 0


def boot_time() -> float:
    """Return the time of day, in seconds, at which the monotonic clock of this process was 0."""
    return time.time() - time.monotonic()


def answer_call(function: Callable[..., Any], row: str, args: tuple, kwargs: dict[str, Any], name: str) -> Any:
    """Make a call of a method in a worker, on the thread with this row. Return its result, in an `Answer` with the
    spans of the process if it asks for them."""
    TRACER.is_on = kwargs.pop(WANTED, False)
    if not TRACER.is_on:
        return function(*args, **kwargs)
    _THREAD.row = row
    with TRACER.span(call_name(name, args)):
        result = function(*args, **kwargs)
    return Answer(result, TRACER.take(), boot_time())


def call_name(method: str, args: tuple) -> str:
    """Return what a call is called in the timeline, such as `policy update`."""
    words = map(str, args[:2]) if method == "call" else [{"step": "generate", "ask": "files"}.get(method, method)]
    return " ".join(words).replace("_", " ")  # `call` is of a role of a rank
