"""Gives requests to the engines, and each request its completion: one task for each engine, on the event loop."""

from __future__ import annotations

import asyncio
import functools
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainer.cluster.worker_groups import CallFutures
from trainer.errors import RESTART_HINT, FailureSource, WorkerError, set_failure_source
from trainer.generation.engine import Completion, Request, by_length, join_interval_s
from trainer.generation.engines import Engines
from trainer.generation.event_loop import Changes, in_thread
from trainer.generation.lifecycle import State
from trainer.process import time_limits


class RequestsDropped(RuntimeError):
    """A weight sync has dropped the requests that were under way."""


class _EngineReplaced(Exception):
    """The process of an engine has been ended during a call."""


@dataclass
class _Pending:
    """A request that is not complete."""

    request: Request
    completion: asyncio.Future[Completion]
    oldest: int = -1
    """Version of the weights that its engine had when it got the request."""


@dataclass
class _Load:
    """What one engine has to do."""

    held: list[int]
    """The requests that it is to generate, in the order in which it gets them."""
    new: list[int]
    """Those of them that it has not got."""
    process: Any = None
    """The one that has got the others."""
    began_at: float | None = None
    """When its running call began; None: none runs."""
    is_interrupted: bool = False
    """The running call is to return for requests that wait, or will be."""


class Dispatcher:
    """Shares requests out over the engines. All methods run on the event loop.

    An engine of `unit = "request"` gets more requests while it generates. One of `unit = "batch"` gets one batch at a
    time, and what is in a batch depends on the requests that are made together alone. The requests of an engine that is
    lost go to the others. After a failure that ends the run, all that wait for completions get it.

    Args:
        unit: of the engines (see `EngineSpec`).
        most: requests that an engine generates together (`rollout.max_num_seqs`).
        capacity: most requests of the unit `request` that an engine has, unless one prompt has more; None: no limit.
        maintain: called again and again while no engine is used from elsewhere; `True`: completions are waited for.
    """

    def __init__(
        self,
        engines: Engines,
        unit: str,
        most: int,
        capacity: int | None,
        maintain: Callable[[bool], Coroutine[Any, Any, None]],
    ):
        self._engines = engines
        self._is_batch = unit == "batch"
        self._most = most
        self._capacity = math.inf if capacity is None else capacity
        self._maintain = maintain
        self._numbers = itertools.count()
        self._pending: dict[int, _Pending] = {}
        self._new: list[int] = []
        """Requests that were made since the last turn of the loop, and are shared out in the next one."""
        self._waiting: deque[list[int]] = deque()
        """Requests that no engine has, those together that one engine is to get."""
        self._loads = [_Load([], []) for _ in engines.group.workers]
        self._changes = Changes()
        self.is_paused = False
        """The engines rest, or are about to."""
        self._is_maintaining = False
        self._failure: BaseException | None = None
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def start(self) -> None:
        """Begin, or begin again after a failure."""
        self.clear()
        self._failure = None
        works = [*(functools.partial(self._serve, engine) for engine in range(len(self._loads))), self._keep_maintained]
        for number, work in enumerate(works):
            if number not in self._tasks or self._tasks[number].done():
                self._tasks[number] = asyncio.ensure_future(self._guarded(work()))

    async def _guarded(self, coroutine: Coroutine[Any, Any, None]) -> None:
        try:
            await coroutine
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._failure = self._failure or error
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Let all that wait for completions now get `error`."""
        pending, self._pending = self._pending, {}
        for one in pending.values():
            if not one.completion.done():
                one.completion.set_exception(error)
        self._changes.notify()

    # ---------------------------------------------------------------------------------------------------
    # Requests

    async def complete(self, requests: Sequence[Request]) -> list[Completion]:
        """Return the completions of requests, in their order. Engines of `unit = "batch"` get them in batches.

        Raises:
            RequestsDropped: a weight sync has dropped them.
            BaseException: whatever has failed for good.
        """
        if self._failure is not None:
            raise self._failure
        loop = asyncio.get_running_loop()
        made = {number: _Pending(one, loop.create_future()) for one, number in zip(requests, self._numbers)}  # noqa: B905
        self._pending |= made
        if self._is_batch:
            numbers = list(made)
            batches = by_length(requests, len(self._loads), self._most)
            self._waiting.extend([numbers[index] for index in batch] for batch in batches)
        else:
            self._new += made
        if len(self._new) <= len(made):
            loop.call_soon(self._share_out)  # with all that others ask for in this turn of the loop
        try:
            return await asyncio.gather(*(one.completion for one in made.values()))
        finally:
            for number in made:
                self._pending.pop(number, None)

    def _share_out(self) -> None:
        """Give each engine the requests that it gets next: those of a prompt go to the one with the fewest requests."""
        new, self._new = [number for number in self._new if number in self._pending], []
        self._waiting.extend(
            _by_prompt({number: self._pending[number].request for number in new}, self._most_of_prompt)
        )
        serving = self._engines.lifecycle.serving
        while self._waiting:
            piece = [number for number in self._waiting[0] if number in self._pending]
            able = [engine for engine in serving if self._fits(engine, piece)]
            if piece and not able:
                break
            self._waiting.popleft()
            if piece:
                load = self._loads[min(able, key=lambda engine: len(self._loads[engine].held))]
                load.held += piece
                load.new += piece
        for engine, load in enumerate(self._loads):
            if load.new and load.began_at is not None and not self._is_batch and not load.is_interrupted:
                load.is_interrupted = True
                due = load.began_at + join_interval_s(len(load.held) - len(load.new)) - time.monotonic()
                asyncio.get_running_loop().call_later(max(0.0, due), self._interrupt_for_new, engine, load.began_at)
        self._changes.notify()

    @property
    def _most_of_prompt(self) -> int:
        return len(self._pending) if self._capacity == math.inf else int(self._capacity)

    def _fits(self, engine: int, piece: Sequence[int]) -> bool:
        held = len(self._loads[engine].held)
        return held == 0 or not self._is_batch and held + len(piece) <= self._capacity

    # ---------------------------------------------------------------------------------------------------
    # Engines

    async def _serve(self, engine: int) -> None:
        """Let an engine generate whenever it has something to do."""
        load, lifecycle = self._loads[engine], self._engines.lifecycle
        while True:
            await self._changes.until(lambda: not self.is_paused and load.held and lifecycle[engine] is State.SERVING)
            if load.process is not self._engines.group.workers[engine]:  # it was replaced while the engines rested
                load.new, load.process = [*load.held], self._engines.group.workers[engine]
            assigned = load.held if self._is_batch else load.new
            cancelled = {*assigned} - self._pending.keys()
            load.held = [number for number in load.held if number not in cancelled]
            new, load.new = [number for number in load.new if number not in cancelled], []
            for number in new:
                self._pending[number].oldest = lifecycle.version(engine)
            if not load.held:
                continue
            load.began_at, load.is_interrupted = time.monotonic(), False
            try:
                completions = await self._call(engine, {number: self._pending[number].request for number in new})
                if any(np.isnan(completion.logprobs).any() for completion in completions.values()):
                    raise self._nonsense(engine)
            except _EngineReplaced:
                self._requeue(engine)
            except Exception as error:
                self._requeue(engine)
                self._engines.mark_failed([engine], error)
            else:
                for number, completion in completions.items():
                    if number in load.held:
                        load.held.remove(number)
                    self._hand_out(number, completion, lifecycle.version(engine))
            finally:
                load.began_at = None
            self._share_out()

    async def _call(self, engine: int, requests: Mapping[int, Request]) -> dict[int, Completion]:
        """Let an engine generate; return what is complete."""
        if self._is_batch:
            done = await in_thread(self._call_process, engine, "generate", list(requests.values()))
            return dict(zip(requests, done, strict=True))
        return await in_thread(self._call_process, engine, "step", requests)

    def _call_process(self, engine: int, method: str, *arguments: Any) -> Any:
        group, calls = self._engines.group, CallFutures(self._engines.group)
        process = group.workers[engine]
        calls.begin(engine, method, *arguments)
        while True:
            for _, result, error in calls.poll():
                if error is not None:
                    raise error
                return result
            if self._engines.lifecycle[engine] is State.DEAD or group.workers[engine] is not process:
                raise _EngineReplaced

    def _hand_out(self, number: int, completion: Completion, newest: int) -> None:
        """Give a request its completion. `newest`: version of the weights that the engine has now."""
        pending = self._pending.get(number)
        if pending is None or pending.completion.done():
            return
        oldest, versions = pending.oldest, completion.weight_versions
        assert oldest <= versions[0] <= versions[1] <= newest, (
            f"a completion of weights {versions}, expected from {oldest} to {newest}"
        )
        pending.completion.set_result(completion)

    def _requeue(self, engine: int) -> None:
        """Take back the requests that a lost engine has not completed, to give them to others."""
        load = self._loads[engine]
        left = {number: self._pending[number].request for number in load.held if number in self._pending}
        self._waiting.extendleft([list(left)] if self._is_batch else _by_prompt(left, self._most_of_prompt))
        load.held, load.new = [], []

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

    def _interrupt_for_new(self, engine: int, began_at: float) -> None:
        """Let an engine return from a call, to get requests that join those which it generates."""
        load = self._loads[engine]
        if load.began_at == began_at and load.new:
            self._interrupt([engine])

    def _interrupt(self, engines: Iterable[int]) -> None:
        alive = [engine for engine in engines if self._engines.lifecycle[engine] is not State.DEAD]
        if alive and not self._is_batch:
            self._engines.group.start_background("interrupt", workers=alive)

    # ---------------------------------------------------------------------------------------------------
    # Pauses

    async def pause(self) -> None:
        """Let the engines rest, so that another thread may use them: for new weights, for example.

        Engines that can do so return from what they generate; the others complete it.
        """
        self.is_paused = True
        self._interrupt(self._busy)
        await self._changes.until(lambda: not self._busy and not self._is_maintaining)

    def resume(self) -> None:
        """Let the engines generate on."""
        self.is_paused = False
        self._share_out()

    @property
    def _busy(self) -> list[int]:
        return [engine for engine, load in enumerate(self._loads) if load.began_at is not None]

    def clear(self) -> None:
        """Forget all requests, which the engines drop. Nobody should wait for them."""
        self.fail(RequestsDropped("a weight sync has dropped the requests that were under way"))
        self._new.clear()
        self._waiting.clear()
        for load in self._loads:
            load.held, load.new = [], []

    def requeue_lost(self) -> None:
        """Take back the requests of engines that were ended while they rested."""
        for engine, load in enumerate(self._loads):
            if load.held and self._engines.lifecycle[engine] is State.DEAD:
                self._requeue(engine)

    async def _keep_maintained(self) -> None:
        while True:
            await asyncio.sleep(time_limits.POLL_INTERVAL_S)
            if self.is_paused or self._failure is not None:
                continue
            self._is_maintaining = True
            try:
                self.requeue_lost()
                await self._maintain(bool(self._pending))
            finally:
                self._is_maintaining = False
            self._share_out()


def _by_prompt(requests: Mapping[int, Request], most: int) -> list[list[int]]:
    """Return the numbers of requests, those of one prompt together: an engine computes the prompt once.

    Args:
        most: longest list; a prompt with more completions is cut.
    """
    prompts: dict[bytes, list[int]] = {}
    for number, request in requests.items():
        prompts.setdefault(request.prompt_token_ids.tobytes(), []).append(number)
    return [numbers[start : start + most] for numbers in prompts.values() for start in range(0, len(numbers), most)]
