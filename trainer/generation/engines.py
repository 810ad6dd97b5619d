"""The processes of the engines: which ones may generate, and what happens when one is lost."""

from __future__ import annotations

import functools
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from trainer.cluster.worker_groups import CallFutures, WorkerGroup
from trainer.config import Config
from trainer.config.rollout import TOKEN
from trainer.config.tasks import POLICY_KEY
from trainer.errors import (
    RESTART_HINT,
    FailureSource,
    NonRetryableError,
    WorkerError,
    describe_error,
    failure_source_of,
    set_failure_source,
)
from trainer.generation.engine import build_engine
from trainer.generation.lifecycle import GpuMemory, Lifecycle, State
from trainer.generation.server_protocol import Job
from trainer.generation.transport import wait_for_all
from trainer.models.files import check_one_reading, check_torchvision
from trainer.process import time_limits
from trainer.process.failures import INCIDENTS, Decision, Restarts, decide, describe
from trainer.process.signals import CONTINUES, SIGNALS, Stopped

LOG = logging.getLogger(__name__)

_SERVER_LOSSES = 20
"""Losses of an inference server within one step after which a further one counts as a restart."""
_SERVER_CAUSES = ("server", "server_absent")
_NO_WEIGHTS = -1
"""Version of an engine whose weights are not those of the policy. Its completions would be refused."""


class _Receiving(CallFutures):
    """Calls of engines that take weights. An engine that its server fails is set aside: no other depends on it."""

    def __init__(self, group: WorkerGroup):
        super().__init__(group)
        self.lost: dict[int, Exception] = {}

    def poll(
        self, timeout_s: float | None = None, check_health: bool = True
    ) -> list[tuple[int, Any, Exception | None]]:
        outcomes = super().poll(timeout_s, check_health)
        failed = {
            one: error for one, _, error in outcomes if isinstance(error, WorkerError) and error.cause == "server"
        }
        self.lost |= failed
        return [outcome for outcome in outcomes if outcome[0] not in failed]


class Engines:
    """The engines of a run. One that dies, hangs or fails is ended, and a new process starts in its place.

    Args:
        group: one member for each engine.
        memory: new processes start when it allows that.
        limit: largest number of new engines within the window (`trainer.max_restarts`).
        window_s: length of the window.
        has_capacity: returns whether the cluster has capacity for at least one of them.
        urls: of the inference servers of the engines, for which they wait while they start. Empty: there are none.
    """

    def __init__(
        self,
        group: WorkerGroup,
        memory: GpuMemory,
        limit: int,
        window_s: float,
        has_capacity: Callable[[], bool],
        urls: Sequence[str] = (),
    ):
        self.group = group
        self._urls = urls
        self._memory = memory
        self.unplaced: set[int] = set()
        """Engines that have no GPUs. They stay dead."""
        self._has_capacity = has_capacity
        self.lifecycle = Lifecycle(len(group))
        self._restarts = Restarts(limit, window_s)
        self._loading = CallFutures(group)
        self._due: dict[int, float] = {}  # when the new process of a dead engine starts
        self._server_losses: Counter[int] = Counter()  # by step
        self._used: set[int] = set()
        """Engines that have loaded once."""
        self._lost: dict[int, tuple[Exception, int, float]] = {}  # failure, step, and paused seconds before it
        self._lost_nodes: set[tuple[int, str | None]] = set()  # the steps and the nodes
        self._paused_s = 0.0
        for engine in range(len(group)):
            self._loading.begin(engine, "set_version", _NO_WEIGHTS)

    def load(self) -> None:
        """Wait until all are loaded; those that die meanwhile are replaced."""
        assert self._memory.may_start
        while self.lifecycle.within(State.STARTING, State.DEAD):
            self._check_stop()
            self.poll()

    def _check_stop(self) -> None:
        """Check signals while no engine can go on.

        Raises:
            Stopped: one has arrived, also within a step that is to be finished first: no server may ever come.
        """
        SIGNALS.check()
        if self._urls and SIGNALS.first:
            raise Stopped(
                f"stopped by {SIGNALS.first} while no inference server answered (rollout.urls): the steps since "
                f"the last checkpoint are not saved; {CONTINUES}"
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
        now = time.monotonic()
        for engine in [engine for engine, due in self._due.items() if due <= now and self._may_start(engine)]:
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

    def _may_start(self, engine: int) -> bool:
        return self._memory.may_start and engine not in self.unplaced

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
            self._check_stop()
            self.poll()
            if time.monotonic() - began > time_limits.CAPACITY_WAIT_S and not self._has_capacity():
                error = WorkerError("no engine is left, and the cluster has no capacity for one", RESTART_HINT, "node")
                set_failure_source(error, FailureSource("engine"))
                raise error
        self._paused_s += time.monotonic() - began

    def call(self, engines: Iterable[int], method: str, *args: Any) -> dict[int, Any]:
        """Call `method` on these engines. Return the results of those that have done it; the others are lost."""
        calls = CallFutures(self.group)
        for engine in engines:
            calls.begin(engine, method, *args)
        return self._results(calls)

    def receive(self, engines: Sequence[int], arguments: tuple[Any, ...], sending: CallFutures) -> list[int]:
        """Let engines take what the ranks send meanwhile; return those that have it.

        An engine whose server does not take it from the engine is lost alone: the ranks have sent all to it.

        Raises:
            Exception: an engine or a rank failed. The others may wait for it without end.
        """
        receiving = _Receiving(self.group)
        for engine in engines:
            receiving.begin(engine, "sync_weights", *arguments)
        wait_for_all(receiving.result, sending.result)
        for engine, error in receiving.lost.items():
            self.mark_failed([engine], error)
        return [engine for engine in engines if engine not in receiving.lost]

    def placements(self) -> list[dict[str, Any]]:
        """Return host, node id and GPU ids of each engine, once all are loaded. Those that die are replaced."""
        while True:
            self.load()
            calls = CallFutures(self.group, "placements")
            for engine in self.lifecycle.loaded:
                calls.begin(engine, "")
            placements = self._results(calls)
            if len(placements) == len(self.group):
                return list(placements.values())

    def _results(self, calls: CallFutures) -> dict[int, Any]:
        """Return the results of calls by engine, in their order. Engines that have failed are lost."""
        results = {}
        while calls.is_running:
            for engine, result, error in calls.poll():
                if error is None:
                    results[engine] = result
                else:
                    self.mark_failed([engine], error)
        return dict(sorted(results.items()))

    def mark_failed(self, engines: Iterable[int], error: Exception) -> None:
        """End engines after a failure. New ones start in their place, at once or after a delay.

        Args:
            engines: several if one failure has spoilt them all; then it counts as one.

        Raises:
            Exception: there are to be no more new engines, or a new one does not help.
        """
        lost = self.end(engines)
        step = INCIDENTS.step
        decision = Decision()
        loss = _lost_node(error)
        successor = "starts"
        if self._may_wait(error, lost):
            decision = Decision(delay_s=time_limits.SERVER_RETRY_S)
            successor = "waits for the server"
        elif loss is None or (step, loss) not in self._lost_nodes:  # one lost node may have had several engines
            decision, self._restarts = decide(self._restarts, error, step, time.monotonic())
        self._lost_nodes.add((step, loss))
        if decision.refusal:
            ending = _ending(error, decision)
            raise ending from (error if ending is not error else None)
        fact = error.message if isinstance(error, WorkerError) else describe_error(error)
        LOG.warning("%s; the other engines take its requests, and a new one %s", fact, successor)
        for engine in lost:
            self._due[engine] = time.monotonic() + decision.delay_s
            if (origin := failure_source_of(error)) is not None and origin.name == f"{self.group.name} {engine}":
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
            self._due[engine] = time.monotonic()
        return ended

    def mark_ready(self, engines: Iterable[int], version: int) -> None:
        """Note that engines have the current weights. Record the incidents of those that had failed before."""
        for engine in engines:
            self.lifecycle.refit(engine, version)
            self._record(engine, "replaced the engine")

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


def engine_builder(cfg: Config, model_path: str, device: str, job: Job | None) -> Callable[..., Any]:
    """Return what makes an engine in its process, from its number.

    Args:
        device: `cuda` or `cpu`, of the engines.
        job: who uses inference servers; None: the engines are none.
    """
    spec = cfg.engine
    if spec.reads_index_first:
        check_one_reading(model_path, POLICY_KEY)
        check_torchvision(cfg.model, model_path)
    return functools.partial(
        build_engine,
        spec,
        os.environ.get(TOKEN) if spec.served else None,
        cfg.trainer.deterministic and spec.deterministic_torch,
        model_path,
        dtype=cfg.rollout.dtype,
        seed=cfg.trainer.seed,
        rollout=cfg.rollout_of_engines,
        device=device,
        trust_remote_code=cfg.model.trust_remote_code,
        **({"lora_rank": cfg.trainer.policy.lora.rank} if cfg.syncs_adapter else {}),
        **({"job": job} if job is not None else {}),
        **({"repeats": True} if spec.served and cfg.trainer.deterministic else {}),
    )


def _lost_node(error: Exception) -> str | None:
    """Return the address of the node with which an engine was lost."""
    origin = failure_source_of(error)
    return origin.node if origin is not None and isinstance(error, WorkerError) and error.cause == "node" else None


def _ending(error: Exception, decision: Decision) -> Exception:
    """Return the exception that ends the run."""
    if decision.repeated:
        return NonRetryableError(f"{decision.refusal}: {error}")
    if not isinstance(error, WorkerError) or error.cause == "cluster":
        return error
    ending = WorkerError(error.message, RESTART_HINT, "restart_limit")
    set_failure_source(ending, failure_source_of(error) or FailureSource("engine"))
    return ending
