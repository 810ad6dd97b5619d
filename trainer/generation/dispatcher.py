"""Gives the requests of all streams to the engines, and each stream its completions."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainer.cluster.worker_groups import CallFutures
from trainer.errors import RESTART_HINT, FailureSource, WorkerError, set_failure_source
from trainer.generation.engine import Completion, Request, join_interval_s
from trainer.generation.engines import Engines
from trainer.generation.lifecycle import State
from trainer.generation.request_scheduler import (
    RequestScheduler,
    by_length,
    by_prompt,
    capacity_of,
    request_costs,
    with_some_of,
)
from trainer.generation.request_stream import RequestStream, StreamAborted
from trainer.process import time_limits
from trainer.process.signals import SIGNALS


@dataclass
class _Pending:
    """A request that is not complete."""

    request: Request
    stream: RequestStream
    key: int
    """Of the request in its stream."""
    oldest: int = -1
    """Version of the weights that its engine had when it got the request."""


@dataclass
class _Call:
    """A call of an engine that runs."""

    process: Any
    """Of the engine."""
    numbers: list[int]
    """Of the requests that the call has added."""
    since: float
    is_interrupted: bool = False


class Dispatcher:
    """Any number of streams of requests to the same engines, read by any threads, in any order.

    One thread at a time has the turn, and works with the engines: a reader that waits for completions, or the training
    thread that brings weights. A reader with the turn serves all streams; the other readers wait until they have got
    completions, or the turn. A failure ends all streams, each on the thread of its reader.

    Every request has a number that no other request of the run has. An engine that is done early takes from what is
    left, and the requests of one that is lost go to the others.

    Args:
        streaming: the engines take requests while they generate (`EngineSpec.streaming`).
        most: requests that an engine can generate together (`rollout.max_num_seqs`).
        deterministic: time does not decide which requests run together, or where (`trainer.deterministic`).
        interrupts: an engine returns from `step` when it is told to (`EngineSpec.in_flight`).
        join: called again and again. It gives weights to engines that have come back, if that needs no rank.
        refit: called when requests wait and no engine is left. It waits for one, and gives it the current weights. It
            returns early when the function that it gets says that another thread wants the turn.
    """

    def __init__(
        self,
        engines: Engines,
        streaming: bool,
        most: int,
        device: str,
        deterministic: bool,
        interrupts: bool,
        join: Callable[[], None],
        refit: Callable[[Callable[[], bool]], None],
    ):
        self._engines = engines
        self._streaming = streaming
        self._most = most
        self._interrupts = interrupts
        self._join = join
        self._refit = refit
        count = len(engines.group)
        self._capacity = capacity_of(count, most, streaming, device, deterministic)
        # Engines without a limit get all of their requests in one call.
        self._plans = deterministic or self._capacity is None
        self._scheduler = RequestScheduler(count, self._capacity)
        self._calls = CallFutures(engines.group)
        self._busy: dict[int, _Call] = {}
        """The running calls, by engine."""
        self._lock = threading.RLock()
        """Guards all that follows, and the scheduler. Only the thread with the turn uses engines and calls."""
        self._returned = threading.Condition(self._lock)
        """Notified when the turn is free."""
        self._owner: int | None = None
        """The thread that has the turn."""
        self._claims = 0
        """Threads that want the turn before any reader."""
        self._numbers = itertools.count()
        self._pending: dict[int, _Pending] = {}
        self._streams: set[RequestStream] = set()
        self._waiting: set[RequestStream] = set()
        """Streams whose readers wait for completions while another thread has the turn."""
        self._new: list[tuple[RequestStream, dict[int, Request]]] = []
        """Requests that are not scheduled, by their numbers."""
        self._closed: deque[RequestStream] = deque()
        """Streams whose requests are to be forgotten. A generator can be collected at any moment, also while this
        thread changes the scheduler; so closing it does no more than to note it here."""

    def stream(
        self, requests: Sequence[Request], wanted: Collection[int] = (), idle_s: float = math.inf
    ) -> Iterator[dict[int, Completion]]:
        """Yield completions, by the indices of their requests, as engines complete them.

        Args:
            idle_s: after so many seconds without a completion, an empty chunk is yielded.
            wanted: indices of the requests whose completions are yielded, to the last bit as if all were. The others
                are generated only where the company of these needs them. Empty: all.

        Raises:
            StreamAborted: the requests were dropped.
            BaseException: whatever has failed, on this thread or on that of another reader.
        """
        with self.open(is_open=False) as stream:
            stream.idle_s = idle_s
            self._add(stream, dict(enumerate(requests)), wanted)
            yield from stream

    def open(self, block: ExitStack | None = None, is_open: bool = True) -> RequestStream:
        """Return a new stream of requests, without any (see `RequestStream` for the arguments)."""
        stream = RequestStream(self, self._lock, block or ExitStack(), is_open)
        with self._lock:
            self._streams.add(stream)
        return stream

    def submit(self, stream: RequestStream, requests: Mapping[int, Request]) -> None:
        """Begin to generate further requests of a stream. Any thread may call this."""
        with self._lock:
            if stream.failure is not None:
                raise stream.failure
            assert stream.is_open, "no further request was to follow"
            self._add(stream, requests)
            stream.ready.notify()

    def _add(self, stream: RequestStream, requests: Mapping[int, Request], wanted: Collection[int] = ()) -> None:
        with self._lock:
            numbers = dict(zip(requests, self._numbers, strict=False))
            self._pending |= {number: _Pending(requests[key], stream, key) for key, number in numbers.items()}
            stream.numbers |= set(numbers.values())
            stream.left |= {numbers[key] for key in wanted or requests}
            self._new.append((stream, {number: requests[key] for key, number in numbers.items()}))

    def drop(self, stream: RequestStream) -> None:
        """Forget the requests of a stream that nobody reads any more. Any thread may call this, at any moment."""
        self._closed.append(stream)

    def next_chunk(self, stream: RequestStream) -> dict[int, Completion] | None:
        """Return what is complete. Waits for it, or until the stream is woken or idle; None: nothing follows."""
        end = time.monotonic() + stream.idle_s
        while True:
            with self._lock:
                is_done = not (stream.left or stream.is_open)
                stream.is_woken |= time.monotonic() > end and not is_done
                if stream.failure is not None or stream.complete or stream.is_woken or is_done:
                    self._pass_on()
                    if stream.failure is not None:
                        raise stream.failure
                    chunk, stream.complete = stream.complete, {}
                    is_woken, stream.is_woken = stream.is_woken, False
                    return chunk if chunk or is_woken else None
                leads = self._owner is None and not self._claims and bool(stream.left)
                if leads:
                    self._owner = threading.get_ident()
                else:
                    if stream.left:
                        self._waiting.add(stream)
                    stream.ready.wait(time_limits.POLL_INTERVAL_S)
                    self._waiting.discard(stream)
            if leads:
                with self._turn_taken():
                    self._advance()
            else:
                self._check_signals()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Keep the engines from all readers while the block runs. Waits until the reader with the turn gives it back.

        Engines that can do so return from what they generate.

        A failure within the block ends all streams.
        """
        with self._lock:
            self._claims += 1
            try:
                while self._owner is not None:
                    self._returned.wait(time_limits.POLL_INTERVAL_S)
                    self._check_signals()
                self._owner = threading.get_ident()
            finally:
                self._claims -= 1
        with self._turn_taken():
            self._interrupt()
            yield

    @contextmanager
    def _turn_taken(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.end(error)
            raise
        finally:
            with self._lock:
                self._owner = None
                self._pass_on()

    def _pass_on(self) -> None:
        """Let a thread that waits take the turn, if it is free."""
        if self._owner is None and self._claims:
            self._returned.notify()
        elif self._owner is None:
            for stream in itertools.islice(self._waiting, 1):
                stream.ready.notify()

    def _check_signals(self) -> None:
        """Raise what a signal asks for, on the main thread; it ends all streams."""
        try:
            SIGNALS.check()
        except BaseException as error:
            self.end(error)
            raise

    def end(self, error: BaseException) -> None:
        """End all streams: their readers get `error`. Any thread may call this. Engines complete what they have begun.

        The engines may have to generate on for a moment, but nobody waits for it.
        """
        with self._lock:
            for stream in self._streams:
                if stream.failure is None and (stream.left or stream.complete or stream.is_open):
                    stream.failure = error
                    self._closed.append(stream)
                stream.ready.notify()

    def _interrupt(self) -> None:
        """Let the engines return from what they generate, so that they soon do what they are told next."""
        with self._lock:
            self._drop_lost()
        if self._busy and self._interrupts:
            self._engines.group.start_background("interrupt", workers=list(self._busy))

    def _interrupt_for_new(self) -> None:
        """Let engines return that could take requests which wait. They join those that the engine generates."""
        now = time.monotonic()
        running = [
            engine
            for engine, call in self._busy.items()
            if not call.is_interrupted and now > call.since + join_interval_s(self._scheduler.count(engine))
        ]
        if not (running and self._interrupts and self._scheduler.is_waiting):
            return
        for engine in self._scheduler.takers(running):
            self._busy[engine].is_interrupted = True
            self._engines.group.start_background("interrupt", workers=[engine])

    def clear(self) -> None:
        """Forget all requests, which the engines drop. Readers of streams that are open get `StreamAborted`."""
        self.end(StreamAborted("a weight sync has aborted the requests of this stream"))
        with self._lock:
            self._scheduler.clear()
            self._pending.clear()
            self._new.clear()

    def _is_wanted(self) -> bool:
        """Whether another thread should get the turn, or the streams of this one have ended."""
        with self._lock:
            return bool(self._claims) or not any(map(self._is_needed, self._streams))

    def _is_needed(self, stream: RequestStream) -> bool:
        return bool(stream.left) and stream.failure is None and stream not in self._closed

    def _forget_closed(self) -> None:
        while self._closed:
            stream = self._closed.popleft()
            self._streams.discard(stream)
            self._new = [(other, requests) for other, requests in self._new if other is not stream]
            self._scheduler.forget(stream.numbers)
            for number in stream.numbers:
                self._pending.pop(number, None)

    def _schedule(self, stream: RequestStream, numbered: Mapping[int, Request]) -> None:
        numbers, requests = list(numbered), list(numbered.values())
        if self._streaming:
            pieces = by_prompt(requests, self._capacity)
        else:
            pieces = by_length(requests, len(self._engines.group), self._most)
        chosen = with_some_of(([numbers[index] for index in piece] for piece in pieces), stream.left)
        costs = dict(zip(numbers, request_costs(requests), strict=True))
        planned = self._engines.lifecycle.serving if self._plans else ()
        self._scheduler.add(chosen, costs, planned)

    def _advance(self) -> None:
        """Keep all engines busy, and hand out what they complete. Waits a moment for it."""
        engines = self._engines
        engines.poll(0)
        self._join()
        with self._lock:
            self._begin_calls()
            # Another thread that wants the turn, or has requests, should wait for this one but a moment.
            is_alone = len(self._streams) == 1 and threading.current_thread() is threading.main_thread()
            may_follow = any(stream.is_open for stream in self._streams)
            if may_follow:
                self._interrupt_for_new()
        if not self._busy:
            if not engines.lifecycle.serving:
                self._refit(self._is_wanted)
            return
        limit_s = time_limits.JOIN_S if may_follow else None if is_alone else time_limits.TURN_S
        ended = self._calls.poll(limit_s)
        failed = []
        with self._lock:
            for engine, result, error in ended:
                numbers = self._busy.pop(engine).numbers
                chunk = {} if error else result if self._streaming else dict(zip(numbers, result, strict=True))
                if any(np.isnan(completion.logprobs).any() for completion in chunk.values()):
                    error = self._nonsense(engine)
                if error is not None:
                    self._scheduler.requeue(engine)
                    failed.append((engine, error))
                    continue
                self._scheduler.mark_done(engine, chunk)
                for number, completion in chunk.items():
                    self._hand_out(number, completion, engines.lifecycle.version(engine))
        for engine, error in failed:
            engines.mark_failed([engine], error)

    def _nonsense(self, engine: int) -> WorkerError:
        """Return the failure of an engine that has returned NaN: its tokens do not come from the policy."""
        name = f"{self._engines.group.name} {engine}"
        error = WorkerError(
            f"{name} has returned a token whose log-prob is NaN (its GPU is faulty, or rollout.dtype or "
            "rollout.engine_args do not suit the model)",
            RESTART_HINT,
        )
        set_failure_source(error, FailureSource(name))
        return error

    def _begin_calls(self) -> None:
        lifecycle = self._engines.lifecycle
        self._forget_closed()
        new, self._new = self._new, []
        for stream, requests in new:
            self._schedule(stream, requests)
        self._drop_lost()
        self._scheduler.replan({*lifecycle.serving, *self._busy})
        idle = [engine for engine in lifecycle.serving if engine not in self._busy]
        given = self._scheduler.assign(idle)
        for engine in idle:
            if self._scheduler.has_work(engine):
                self._begin(engine, given.get(engine, []))
        assert self._busy or not lifecycle.serving or not any(map(self._is_needed, self._streams)), "nobody works"

    def _begin(self, engine: int, numbers: list[int]) -> None:
        version = self._engines.lifecycle.version(engine)
        for number in numbers:
            self._pending[number].oldest = version
        requests = [self._pending[number].request for number in numbers]
        if self._streaming:
            self._calls.begin(engine, "step", dict(zip(numbers, requests, strict=True)))
        else:
            self._calls.begin(engine, "generate", requests)
        self._busy[engine] = _Call(self._engines.group.workers[engine], numbers, time.monotonic())

    def _hand_out(self, number: int, completion: Completion, newest: int) -> None:
        """Give a completion to its stream, unless that is closed.

        Args:
            newest: version of the weights that the engine has now.
        """
        pending = self._pending.pop(number, None)
        if pending is None:
            return
        stream = pending.stream
        oldest, versions = pending.oldest, completion.weight_versions
        assert oldest <= versions[0] <= versions[1] <= newest, (
            f"a completion of weights {versions}, expected from {oldest} to {newest}"
        )
        stream.numbers.discard(number)
        if number not in stream.left:  # it was company
            return
        stream.left.discard(number)
        stream.complete[pending.key] = completion
        stream.ready.notify()

    def _drop_lost(self) -> None:
        """Take back the requests of engines that have been ended since the last call, by a weight sync for example."""
        for engine, call in list(self._busy.items()):
            if self._engines.lifecycle[engine] is State.DEAD or self._engines.group.workers[engine] is not call.process:
                self._calls.drop_calls(engine)
                del self._busy[engine]
                self._scheduler.requeue(engine)
