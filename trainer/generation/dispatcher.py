"""Gives the requests of all streams to the engines, and each stream its completions."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.cluster.worker_groups import CallFutures
from trainer.generation.engine import Completion, Request
from trainer.generation.engines import Engines
from trainer.generation.lifecycle import State
from trainer.generation.request_scheduler import RequestScheduler, by_length, by_prompt, capacity_of, request_costs


@dataclass
class _Stream:
    """What the reader of a stream waits for."""

    left: set[int]
    """Numbers of the requests that are not complete."""
    complete: dict[int, Completion] = field(default_factory=dict)
    """Completions that the reader has not got, by the indices of their requests."""


@dataclass
class _Pending:
    """A request that is not complete."""

    request: Request
    stream: _Stream
    index: int
    """Of the request in its stream."""
    oldest: int = -1
    """Version of the weights that its engine had when it got the request."""


class Dispatcher:
    """Any number of streams of requests to the same engines. One thread reads them, in any order.

    Every request has a number that no other request of the run has. An engine that is done early takes from what is
    left, and the requests of one that is lost go to the others.

    Args:
        streaming: the engines take requests while they generate (`EngineSpec.streaming`).
        most: requests that an engine can generate together (`rollout.max_num_seqs`).
        deterministic: time does not decide which requests run together, or where (`trainer.deterministic`).
        refit: called when requests wait and no engine is left. It waits for one, and gives it the current weights.
    """

    def __init__(
        self,
        engines: Engines,
        streaming: bool,
        most: int,
        device: str,
        deterministic: bool,
        refit: Callable[[], None],
    ):
        self._engines = engines
        self._streaming = streaming
        self._most = most
        self._refit = refit
        count = len(engines.group)
        self._capacity = capacity_of(count, most, streaming, device, deterministic)
        # Engines without a limit get all of their requests in one call.
        self._plans = deterministic or self._capacity is None
        self._scheduler = RequestScheduler(count, self._capacity)
        self._calls = CallFutures(engines.group)
        self._busy: dict[int, tuple[Any, list[int]]] = {}
        """For each engine with a running call: its process, and the numbers of the requests that the call has added."""
        self._numbers = itertools.count()
        self._pending: dict[int, _Pending] = {}
        self._thread = 0

    def stream(self, requests: Sequence[Request]) -> Iterator[dict[int, Completion]]:
        """Yield all completions, by the indices of their requests, as engines complete them."""
        if not self._pending:
            self._thread = threading.get_ident()
        self._check_thread()
        numbers = list(itertools.islice(self._numbers, len(requests)))
        stream = _Stream(set(numbers))
        self._pending |= {number: _Pending(requests[index], stream, index) for index, number in enumerate(numbers)}
        self._schedule(requests, numbers)
        try:
            while stream.left or stream.complete:
                if stream.complete:
                    chunk, stream.complete = stream.complete, {}
                    yield chunk
                    continue
                assert stream.left <= self._pending.keys(), "a weight sync has aborted the requests of this stream"
                self._advance()
        finally:
            self._close(stream)

    def abort(self) -> None:
        """Forget all requests, which the engines drop. A stream that is open must not be read on."""
        self._scheduler.clear()
        self._pending.clear()

    def _close(self, stream: _Stream) -> None:
        self._scheduler.forget(stream.left)
        for number in stream.left:
            self._pending.pop(number, None)

    def _schedule(self, requests: Sequence[Request], numbers: Sequence[int]) -> None:
        if self._streaming:
            pieces = by_prompt(requests, self._capacity)
        else:
            pieces = by_length(requests, len(self._engines.group), self._most)
        costs = dict(zip(numbers, request_costs(requests), strict=True))
        planned = self._engines.lifecycle.serving if self._plans else ()
        self._scheduler.add([[numbers[index] for index in piece] for piece in pieces], costs, planned)

    def _advance(self) -> None:
        """Keep all engines busy, and hand out what they complete. Waits a moment for it."""
        self._check_thread()
        engines, lifecycle = self._engines, self._engines.lifecycle
        self._drop_lost()
        self._scheduler.replan({*lifecycle.serving, *self._busy})
        idle = [engine for engine in lifecycle.serving if engine not in self._busy]
        given = self._scheduler.assign(idle)
        for engine in idle:
            if self._scheduler.has_work(engine):
                self._begin(engine, given.get(engine, []))
        if not self._busy:
            self._refit()
        ended = [(engine, self._busy.pop(engine)[1], result, error) for engine, result, error in self._calls.poll()]
        for engine, numbers, result, error in ended:
            if error is not None:
                self._scheduler.requeue(engine)
                engines.mark_failed([engine], error)
                continue
            chunk = result if self._streaming else dict(zip(numbers, result, strict=True))
            self._scheduler.mark_done(engine, chunk)
            for number, completion in chunk.items():
                self._hand_out(number, completion, lifecycle.version(engine))
        engines.poll(0)

    def _check_thread(self) -> None:
        assert threading.get_ident() == self._thread, "one thread reads all open streams of an engine pool"

    def _begin(self, engine: int, numbers: list[int]) -> None:
        version = self._engines.lifecycle.version(engine)
        for number in numbers:
            self._pending[number].oldest = version
        requests = [self._pending[number].request for number in numbers]
        if self._streaming:
            self._calls.begin(engine, "step", dict(zip(numbers, requests, strict=True)))
        else:
            self._calls.begin(engine, "generate", requests)
        self._busy[engine] = self._engines.group.workers[engine], numbers

    def _hand_out(self, number: int, completion: Completion, newest: int) -> None:
        """Give a completion to its stream, unless that is closed.

        Args:
            newest: version of the weights that the engine has now.
        """
        pending = self._pending.pop(number, None)
        if pending is None:
            return
        oldest, versions = pending.oldest, completion.weight_versions
        assert oldest <= versions[0] <= versions[1] <= newest, (
            f"a completion of weights {versions}, expected from {oldest} to {newest}"
        )
        pending.stream.left.discard(number)
        pending.stream.complete[pending.index] = completion

    def _drop_lost(self) -> None:
        """Take back the requests of engines that have been ended since the last call, by a weight sync for example."""
        for engine, (process, _) in list(self._busy.items()):
            if self._engines.lifecycle[engine] is State.DEAD or self._engines.group.workers[engine] is not process:
                self._calls.drop_calls(engine)
                del self._busy[engine]
                self._scheduler.requeue(engine)
