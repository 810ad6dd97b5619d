"""The engines of a run: their processes, which requests each has, and what happens when one is lost."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainer.cluster.worker_groups import Backend, CallFutures, WorkerGroup
from trainer.config import Config
from trainer.errors import (
    RESTART_HINT,
    FailureSource,
    NonRetryableError,
    WorkerError,
    describe_error,
    failure_source_of,
    set_failure_source,
)
from trainer.generation.engine import Completion, Pending, Request, by_length, by_prompt, join_interval_s
from trainer.generation.event_loop import Changes, EventLoop, in_thread
from trainer.generation.fleet import Fleet
from trainer.generation.lifecycle import GpuMemory, Lifecycle, State
from trainer.process import time_limits
from trainer.process.failures import INCIDENTS, Decision, Restarts, decide, describe
from trainer.process.signals import CONTINUES, SIGNALS, Stopped

LOG = logging.getLogger(__name__)

_SERVER_LOSSES = 20
"""Losses of an inference server within one step after which a further one counts as a restart."""
_SERVER_CAUSES = ("server", "server_absent")
_NO_WEIGHTS = -1
"""Version of an engine whose weights are not those of the policy. Its completions would be refused."""


class RequestsDropped(RuntimeError):
    """A weight sync has dropped the requests that were under way."""


@dataclass
class _Load:
    """What one engine has to do."""

    held: list[int]  # the requests that it is to generate, in the order in which it gets them
    new: list[int]  # those of them that it has not got
    began_at: float | None = None  # when its running call began; None: none runs
    is_interrupted: bool = False  # the running call is to return for requests that wait, or will be


class Engines:
    """The engines of a run, and the requests of all coroutines: one task for each engine, on the event loop.

    An engine of `unit = "request"` gets more requests while it generates. One of `unit = "batch"` gets one batch at a
    time, and what is in a batch depends on the requests that are made together alone. An engine that dies, hangs or
    fails is ended, its requests go to the others, and a new process starts in its place. After a failure that ends the
    run, all that wait for completions get it.

    These states must not exist: a request that two engines have; an engine that generates and does not serve (see
    `Lifecycle`), or that is ended, slept or given weights while it generates. So all but requests is for the main
    thread between `pause` and `resume`, and for `maintain`, during which nobody pauses.

    Args:
        group: one member for each engine.
        memory: new processes start when it allows that.
        has_capacity: returns whether the cluster has capacity for at least one of them.
        capacity: most requests of the unit `request` that an engine has, unless one prompt has more; None: no limit.
        maintain: called again and again while the engines are not paused; `True`: completions are waited for.
        fleet: the engines that join and leave; None: none may.
    """

    def __init__(
        self,
        cfg: Config,
        group: WorkerGroup,
        loop: EventLoop,
        memory: GpuMemory,
        has_capacity: Callable[[], bool],
        capacity: int | None,
        maintain: Callable[[bool], Coroutine[Any, Any, None]],
        fleet: Fleet | None = None,
    ):
        self.group = group
        self._fleet = fleet
        self._own = len(group)  # engines of the job itself, which come first. Batches are cut for them, whoever joins
        self.lifecycle = Lifecycle(len(group))
        self.unplaced: set[int] = set()  # Engines that have no GPUs. They stay dead.
        self._loop = loop
        self._memory = memory
        self._has_capacity = has_capacity
        self._is_served = cfg.engine.served  # by inference servers, for which engines wait while they start
        self._restarts = Restarts(cfg.trainer.max_restarts, time_limits.RESTART_WINDOW_S)
        self._loading = CallFutures(group)
        self._due: dict[int, float] = {}  # when the new process of a dead engine starts
        self._server_losses: Counter[int] = Counter()  # by step
        self._used: set[int] = set()  # engines that have loaded once
        self._lost: dict[int, tuple[Exception, int, float]] = {}  # failure, step, and paused seconds before it
        self._lost_nodes: set[tuple[int, str | None]] = set()  # the steps and the nodes
        self._paused_s = 0.0
        self._is_batch = cfg.engine.unit == "batch"
        self._most = cfg.rollout.max_num_seqs  # requests that an engine generates together
        self._capacity = math.inf if capacity is None else capacity
        self._maintain = maintain
        self._numbers = itertools.count()
        self._pending: dict[int, Pending] = {}
        self.continued_tokens = 0  # that engines have handed back when they left
        self._new: list[int] = []
        """Requests that were made since the last turn of the loop, and are shared out in the next one."""
        self._waiting: deque[list[int]] = deque()
        """Requests that no engine has, those together that one engine is to get."""
        self._loads = [_Load([], []) for _ in group.workers]
        self._changes = Changes()
        self.is_paused = False  # the engines rest, or are about to
        self._is_maintaining = False
        self._failure: BaseException | None = None
        self._tasks: dict[int, asyncio.Task[None]] = {}
        for engine in range(len(group)):
            self._loading.begin(engine, "set_version", _NO_WEIGHTS)

    # ---------------------------------------------------------------------------------------------------
    # Requests, on the event loop

    def start(self) -> None:
        """Begin, or begin again after a failure."""
        self.clear()
        self._failure = None
        self._start_tasks()

    def _start_tasks(self) -> None:
        works = {engine: functools.partial(self._serve, engine) for engine in range(len(self._loads))}
        for number, work in {**works, -1: self._keep_maintained}.items():
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

    async def complete(self, requests: Sequence[Request]) -> list[Completion]:
        """Return the completions of requests, in their order. Engines of `unit = "batch"` get them in batches.

        Raises:
            RequestsDropped: a weight sync has dropped them.
            BaseException: whatever has failed for good.
        """
        if self._failure is not None:
            raise self._failure
        loop = asyncio.get_running_loop()
        made = {number: Pending(one, loop.create_future()) for one, number in zip(requests, self._numbers)}  # noqa: B905
        self._pending |= made
        if self._is_batch:
            numbers = list(made)
            batches = by_length(requests, max(1, self._own), self._most)
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
        self._waiting.extend(by_prompt({number: self._pending[number].request for number in new}, self._most_of_prompt))
        serving = self.lifecycle.serving
        while self._waiting:
            piece = [number for number in self._waiting[0] if number in self._pending]
            able = [
                engine
                for engine in serving
                if not (held := len(self._loads[engine].held))
                or not self._is_batch
                and held + len(piece) <= self._capacity
            ]
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

    async def _serve(self, engine: int) -> None:
        """Let an engine generate whenever it has something to do."""
        load, lifecycle = self._loads[engine], self.lifecycle
        while True:
            await self._changes.until(lambda: not self.is_paused and load.held and lifecycle[engine] is State.SERVING)
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
                requests = {number: self._pending[number].request for number in new}
                completions = await in_thread(self._generate, engine, requests)
                if any(np.isnan(completion.logprobs).any() for completion in completions.values()):
                    name = f"{self.group.name} {engine}"
                    nonsense = WorkerError(
                        f"{name} has returned a token whose log-prob is NaN (its GPU is faulty, or rollout.dtype or "
                        "rollout.engine_args do not suit the model)",
                        RESTART_HINT,
                    )
                    set_failure_source(nonsense, FailureSource(name))
                    raise nonsense  # its tokens do not come from the policy
            except Exception as error:
                self.mark_failed([engine], error)
            else:
                for number, completion in completions.items():
                    if number in load.held:
                        load.held.remove(number)
                    self._hand_out(number, completion, lifecycle.version(engine))
            finally:
                load.began_at = None
            self._share_out()

    def _generate(self, engine: int, requests: Mapping[int, Request]) -> dict[int, Completion]:
        if self._is_batch:
            return dict(zip(requests, self.group.call_one(engine, "generate", list(requests.values())), strict=True))
        return self.group.call_one(engine, "step", requests)

    def _hand_out(self, number: int, completion: Completion, newest: int) -> None:
        """Give a request its completion. `newest`: version of the weights that the engine has now."""
        pending = self._pending.get(number)
        if pending is None or pending.completion.done():
            return
        oldest, versions = pending.oldest, completion.weight_versions
        assert oldest <= versions[0] <= versions[1] <= newest, (
            f"a completion of weights {versions}, expected from {oldest} to {newest}"
        )
        if not pending.add(completion):
            self.continued_tokens += len(completion.token_ids)
            self._waiting.appendleft([number])

    def _requeue(self, engine: int) -> None:
        """Take back the requests that an engine had when it was ended, to give them to others."""
        load = self._loads[engine]
        left = {number: self._pending[number].request for number in load.held if number in self._pending}
        self._waiting.extendleft([list(left)] if self._is_batch else by_prompt(left, self._most_of_prompt))
        load.held, load.new = [], []
        self._share_out()

    def _interrupt_for_new(self, engine: int, began_at: float) -> None:
        """Let an engine return from a call, to get requests that join those which it generates."""
        load = self._loads[engine]
        if load.began_at == began_at and load.new:
            self._interrupt([engine])

    def _interrupt(self, engines: Iterable[int]) -> None:
        alive = [engine for engine in engines if self.lifecycle[engine] is not State.DEAD]
        if alive and not self._is_batch:
            self.group.start_background("interrupt", workers=alive)

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

    async def _keep_maintained(self) -> None:
        while True:
            await asyncio.sleep(time_limits.POLL_INTERVAL_S)
            if self.is_paused or self._failure is not None:
                continue
            self._is_maintaining = True
            try:
                await self._maintain(bool(self._pending))
            finally:
                self._is_maintaining = False
            self._share_out()

    # ---------------------------------------------------------------------------------------------------
    # Processes

    def load(self) -> None:
        """Wait until all are loaded; those that die meanwhile are replaced."""
        assert self._memory.may_start
        while any(engine < self._own for engine in self.lifecycle.within(State.STARTING, State.DEAD)):
            self._poll_or_stop()

    def _poll_or_stop(self) -> None:
        """Call `poll` while no engine can go on.

        Raises:
            Stopped: a signal has arrived, also within a step that is to be finished first: no server may ever come.
        """
        self.poll()
        if (self._is_served or self._fleet is not None) and SIGNALS.first:
            absent = "inference server answered (rollout.urls)" if self._is_served else "engine served"
            raise Stopped(
                f"stopped by {SIGNALS.first} while no {absent}: the steps since the last checkpoint are not saved; "
                f"{CONTINUES}"
            )

    def finish_starts(self) -> None:
        """Wait until no engine starts. Those that died a moment ago may start later."""
        while self.lifecycle.within(State.STARTING):
            self.poll()

    def check(self) -> None:
        """Find engines that have died."""
        self.lifecycle.mark_stale(self.lifecycle.loaded)
        self.call(self.lifecycle.loaded, "set_version", _NO_WEIGHTS)

    def poll(self, wait_s: float = time_limits.POLL_INTERVAL_S) -> None:
        """Start the new processes that are due, and note which engines have loaded. Waits a moment for them."""
        SIGNALS.check()
        if self._fleet is not None:
            self._fleet.update(self)
        now = time.monotonic()
        due = [engine for engine, due in self._due.items() if due <= now and engine not in self.unplaced]
        for engine in due if self._memory.may_start else ():
            del self._due[engine]
            self.lifecycle.replace(engine)
            self.group.replace(engine)
            self._loading.begin(engine, "set_version", _NO_WEIGHTS)
        if not self._loading.is_running:
            time.sleep(wait_s if self._due else 0)
        for engine, _, error in self._loading.poll(wait_s):
            if error is None:
                self.lifecycle.load(engine)
                self._used.add(engine)
            else:
                self.mark_failed([engine], error)

    def admit(self, engine: int | None, name: str, process: Any, backend: Backend) -> int:
        """Take in an engine that has joined; return its number.

        Args:
            engine: the number of one that has left, whose place it takes; None: it takes a new one.
        """
        if engine is None:
            engine = len(self._loads)
            self._loads.append(_Load([], []))
            self.group.admit(engine, name, process, backend)
            self.lifecycle.add()
        else:
            self.lifecycle.replace(engine)
            self.group.admit(engine, name, process, backend)
        self._loading.begin(engine, "set_version", _NO_WEIGHTS)
        self._loop.post(self._start_tasks)
        return engine

    def is_idle(self, engine: int) -> bool:
        """Return whether no call of the engine runs."""
        return self._loads[engine].began_at is None

    def wait_for_capacity(self, gives_up: Callable[[], bool] = lambda: False) -> None:
        """Wait until an engine can get weights. The seconds count as the cost of the incidents.

        Args:
            gives_up: returns whether to return without an engine. It may be called again and again.

        Raises:
            WorkerError: the cluster has no capacity for an engine. It may have one if fewer ranks start again.
        """
        assert self._memory.may_start
        began = time.monotonic()
        while not self.lifecycle.loaded and not gives_up():
            self._poll_or_stop()
            if self._fleet is not None:
                if time.monotonic() - began > (time_limits.CAPACITY_WAIT_S if self._own else time_limits.FLEET_POLL_S):
                    self._fleet.note_wait()
            elif time.monotonic() - began > time_limits.CAPACITY_WAIT_S and not self._has_capacity():
                error = WorkerError("no engine is left, and the cluster has no capacity for one", RESTART_HINT, "node")
                set_failure_source(error, FailureSource("engine"))
                raise error
        self._paused_s += time.monotonic() - began

    def call(self, engines: Iterable[int], method: str, *args: Any, channel: str = "call") -> dict[int, Any]:
        """Call `method` on these engines; return the results by engine. Engines that have not done it are lost."""
        calls, results = CallFutures(self.group, channel), {}
        for engine in engines:
            calls.begin(engine, method, *args)
        while calls.is_running:
            for engine, result, error in calls.poll():
                if error is None:
                    results[engine] = result
                else:
                    self.mark_failed([engine], error)
        return dict(sorted(results.items()))

    def placements(self) -> list[dict[str, Any]]:
        """Return host, node id and GPU ids of each engine, once all are loaded. Those that die are replaced."""
        while True:
            self.load()
            placements = self.call(self.lifecycle.loaded[: self._own], "", channel="heartbeat")
            if len(placements) == self._own:
                return list(placements.values())

    def mark_failed(self, engines: Iterable[int], error: Exception) -> None:
        """End engines after a failure. New ones start in their place, at once or after a delay.

        Args:
            engines: several if one failure has spoilt them all; then it counts as one.

        Raises:
            Exception: there are to be no more new engines, or a new one does not help.
        """
        lost = self.end(engines)
        if self._fleet is not None:
            lost = self._fleet.lose(lost, error)
        if not lost:
            return
        step = INCIDENTS.step
        decision = Decision()
        origin = failure_source_of(error)
        loss = origin.node if origin is not None and isinstance(error, WorkerError) and error.cause == "node" else None
        successor = "starts"
        if self._may_wait(error, lost):
            decision = Decision(delay_s=time_limits.SERVER_RETRY_S)
            successor = "waits for the server"
        elif loss is None or (step, loss) not in self._lost_nodes:  # one lost node may have had several engines
            decision, self._restarts = decide(self._restarts, error, step, time.monotonic())
        self._lost_nodes.add((step, loss))
        if decision.refusal:
            if decision.repeated:
                raise NonRetryableError(f"{decision.refusal}: {error}") from error
            if not isinstance(error, WorkerError) or error.cause == "cluster":
                raise error
            ending = WorkerError(error.message, RESTART_HINT, "restart_limit")
            set_failure_source(ending, origin or FailureSource("engine"))
            raise ending from error
        fact = error.message if isinstance(error, WorkerError) else describe_error(error)
        LOG.warning("%s; the other engines take its requests, and a new one %s", fact, successor)
        for engine in lost:
            self._due[engine] = time.monotonic() + decision.delay_s
            if origin is not None and origin.name == f"{self.group.name} {engine}":
                self._lost[engine] = error, step, self._paused_s

    def _may_wait(self, error: Exception, lost: Sequence[int]) -> bool:
        """Return whether a new engine, which waits for its inference server, is no restart that counts.

        A server that has not come within its time limit is waited for again only if the run has used it before, and
        another engine serves meanwhile. Servers that fail again and again in one step do count: they are not away.
        """
        if not isinstance(error, WorkerError) or error.cause not in _SERVER_CAUSES:
            return False
        self._server_losses[INCIDENTS.step] += 1
        if self._server_losses[INCIDENTS.step] > _SERVER_LOSSES * len(self.group):
            return False
        return error.cause == "server" or bool(self.lifecycle.loaded) and self._used.issuperset(lost)

    def end(self, engines: Iterable[int]) -> list[int]:
        """End those of these engines that are not dead, and return them. New ones start in their place."""
        ended = [engine for engine in engines if self.lifecycle[engine] is not State.DEAD]
        for engine in ended:
            self.lifecycle.die(engine)
            self._loading.drop_calls(engine)
            self.group.end(engine)
            if engine < self._own:
                self._due[engine] = time.monotonic()
            self._loop.post(self._requeue, engine)
        return ended

    def mark_ready(self, engines: Iterable[int], version: int) -> None:
        """Note that engines have the current weights. Record the incidents of those that had failed before."""
        for engine in engines:
            self.lifecycle.refit(engine, version)
            self._record(engine, "replaced the engine")
            if self._fleet is not None:
                self._fleet.note_joined(engine)

    def shutdown(self) -> None:
        """End the engines. The run has ended, so failures are only logged."""
        try:
            calls = CallFutures(self.group)
            for engine in self.lifecycle.loaded:
                calls.begin(engine, "shutdown")
            while calls.is_running:
                for _, _, error in calls.poll():
                    if error is not None:  # a dead process, or CUDA in an engine that sleeps
                        LOG.info("an engine has failed at its end: %s", describe_error(error))
        except WorkerError as error:
            LOG.info("%s", error.message)
        for engine in list(self._lost):
            self._record(engine, "continued without the engine")

    def _record(self, engine: int, action: str) -> None:
        if engine in self._lost:
            error, step, paused_s = self._lost.pop(engine)
            INCIDENTS.record(describe(error, step, action, self._paused_s - paused_s))
