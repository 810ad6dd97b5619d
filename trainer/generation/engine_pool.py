"""The engines of a run: started, given requests, and kept at the policy's weights."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from trainer.cluster.resources import gpus_per_engine
from trainer.cluster.worker_groups import CallFutures, WorkerGroup
from trainer.config import Config
from trainer.config.tasks import POLICY_KEY
from trainer.errors import (
    RESTART_HINT,
    FailureSource,
    UserError,
    WorkerError,
    describe_error,
    failure_source_of,
    set_failure_source,
)
from trainer.generation.engine import Completion, Request, RunningRequests, build_engine
from trainer.generation.engines import Engines
from trainer.generation.event_loop import EventLoop, in_thread
from trainer.generation.fleet import Fleet
from trainer.generation.lifecycle import GpuAssignment, GpuMemory, State, assign_gpus, colocated_ranks, gpus_of
from trainer.generation.server_protocol import Job, describe_model
from trainer.generation.transport import (
    ADAPTER,
    TRANSPORTS,
    AdapterTransport,
    Ends,
    FixedWeights,
    PolicyRanks,
    Transport,
    choose_transport,
)
from trainer.models.files import check_one_reading, check_torchvision
from trainer.process.model_server import TOKEN
from trainer.process.signals import SIGNALS

if TYPE_CHECKING:
    from trainer.cluster.worker_groups import Cluster

LOG = logging.getLogger(__name__)


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


class EnginePool:
    """Engines on `cluster` that divide the requests among them and follow the policy's weights.

    Construction returns while the engines start. If they share the GPUs of the ranks, the ranks may load nothing there
    before `wait_ready`. Who has the memory of shared GPUs, and when engines may start, sleep and get weights, is in
    `trainer.generation.lifecycle`.

    Args:
        ranks: those that train the policy, or fixed weights in their place.
        model_path: the initial weights of the engines, a local directory or Hub id.
        keeps_weights: engines generate while the ranks train. So the weights of the last sync are kept, if the way of
            the weights allows that: engines that come back get these.
    """

    def __init__(
        self,
        cfg: Config,
        cluster: Cluster,
        ranks: PolicyRanks | FixedWeights,
        model_path: str,
        keeps_weights: bool = False,
    ):
        self._cfg = cfg
        self._cluster = cluster
        self._fixed = ranks if isinstance(ranks, FixedWeights) else None
        self._ranks = cast(PolicyRanks, ranks)
        self._version = 0
        self._keeps_weights = keeps_weights = keeps_weights or cfg.rollout.fleet  # for engines that join at any time
        self._has_initial_weights = False  # the weights of the policy are those that engines start with
        self.synced_bytes = 0  # size of the weights or adapters of the last sync
        self.weights_digest: str | None = None
        """Of the weights of the last sync, which all engines that serve have proved (see `Engine.sync_weights`)."""
        self.loop = EventLoop()  # on which completions are asked for
        self._waking_bytes = 0  # of each GPU; 0: not known
        self._spec = spec = cfg.engine
        self._gpus = gpus_per_engine(cfg, cluster.device)  # of each engine
        self._device = "cuda" if self._gpus else "cpu"  # of the engines
        self._readying = asyncio.Lock()
        self._fleet = Fleet(cfg, model_path, self._device) if cfg.rollout.fleet else None
        self._memory = GpuMemory(cfg.rollout.colocate and self._gpus > 0)
        self._has_started = self._has_synced = False
        self._assignments: list[GpuAssignment | None] = []
        if self._memory.shared:  # what cannot work is refused before the engines load
            self._assign_gpus()
            self._way = self._choose_way(self._rank_placements)
        assignment = (lambda engine: self._assignments[engine]) if self._memory.shared else None
        environment = spec.environment_on(self._device, cfg.trainer.deterministic)
        numbers = [(number,) for number in range(cfg.rollout.num_engines)]
        self._job: Job | None = None  # who uses inference servers
        if spec.served:
            self._job = Job.of_run(cfg.trainer.run_dir, describe_model(cfg.model, model_path, cfg.longest_sequence))
        if spec.reads_index_first:
            check_one_reading(model_path, POLICY_KEY)
            check_torchvision(cfg.model, model_path)
        build = functools.partial(
            build_engine,
            spec,
            os.environ.get(TOKEN) if spec.served else None,
            cfg.trainer.deterministic and spec.deterministic_torch,
            model_path,
            dtype=cfg.rollout.dtype,
            seed=cfg.trainer.seed,
            rollout=cfg.rollout_of_engines,
            device=self._device,
            trust_remote_code=cfg.model.trust_remote_code,
            **({"lora_rank": cfg.trainer.policy.lora.rank} if cfg.syncs_adapter else {}),
            **({"job": self._job} if spec.served else {}),
            **({"repeats": True} if spec.served and cfg.trainer.deterministic else {}),
        )
        group = cluster.launch_engines(build, numbers, environment, assignment)
        has_capacity = functools.partial(cluster.has_capacity, group)
        several = cfg.rollout.fleet or self._device == "cuda" and len(group) > 1
        capacity = cfg.rollout.max_num_seqs if several else None  # the others may get the rest
        self._engines = Engines(
            cfg, group, self.loop, self._memory, has_capacity, capacity, self._maintain, self._fleet
        )
        self._ends = Ends(cfg, cluster, ranks, model_path, self._device, keeps_weights)
        self._receivers: list[Any] = []  # the processes of the engines that the transport reaches

    @property
    def repeats(self) -> bool:
        """Whether the engines generate the same tokens and log-probs again, to the last bit."""
        return self._spec.repeats and (self._cluster.device == "cpu" or self._cfg.trainer.deterministic)

    @property
    def continued_tokens(self) -> int:
        """Tokens, since the start, that engines have handed back when they left and others have continued from."""
        return self._engines.continued_tokens

    @property
    def unit(self) -> str:
        """What decides the last bits of a completion: its `request`, or the `batch` (see `EngineSpec`)."""
        return self._spec.unit

    @contextmanager
    def _at_rest(self) -> Iterator[None]:
        """Keep the engines from generating while the block runs, on the main thread, which uses them.

        A failure in the block ends all requests.
        """
        self.loop.run(self._engines.pause())
        try:
            yield
        except BaseException as error:
            self.loop.call(self._engines.fail, error)
            raise
        finally:
            self.loop.call(self._engines.resume)

    def wait_ready(self) -> None:
        """Wait until the ranks may load models on the GPUs. Once, before they do.

        An engine measures what is free while it starts, and takes its share. The ranks need that memory afterwards.
        """
        if self._memory.shared:
            self._engines.load()
            self._put_to_sleep()

    def start(self, version: int, is_initial: bool) -> None:
        """Wait for the engines, and bring them to the policy's weights. Again if the ranks have been started again.

        Args:
            version: of the policy's weights.
            is_initial: these are the initial weights, which new engines hold already.

        Raises:
            UserError: weights cannot reach the engines in the way that the config says.
        """
        self.loop.call(self._engines.start)
        with self._at_rest(), SIGNALS.waiting():
            self._start(version, is_initial)

    def _start(self, version: int, is_initial: bool) -> None:
        held: set[int] = set()
        if not (self._spec.served or self._memory.shared or self._keeps_weights):
            # They keep the weights of this version while ranks start again, as a run has one state for each version.
            # Else the weights may be elsewhere: in a server, in memory that engines share, or kept for other engines.
            lifecycle = self._engines.lifecycle  # before the check, which takes their version away
            held = {engine for engine in lifecycle.serving if lifecycle.version(engine) == version}
        if self._has_started or self._memory.shared:
            self._engines.check()
            if self._memory.shared:  # the ranks may have been started again on other GPUs
                self._follow_ranks()
            self._wait_for_engine()
        else:
            self._engines.load()
            if self._fixed is None:
                self._way = self._choose_way([*self._ranks.policy.placements(), *self._engines.placements()])
        self._has_started = True
        if self._fixed is not None:
            self._transport: Transport = self._fixed
        else:
            self._transport = (AdapterTransport if self._way == ADAPTER else TRANSPORTS[self._way])(self._ends)
        self._transport.check()
        loaded = self._engines.lifecycle.loaded
        self._meet(loaded)
        holds_initial = not self._spec.served and self._fleet is None
        starts_initial = is_initial and holds_initial and self._transport.is_checked
        if starts_initial or loaded and held.issuperset(loaded):
            self.loop.call(self._engines.clear)
            self._engines.mark_ready(self._engines.call(loaded, "set_version", version), version)
            self._version = version
            self._has_initial_weights = starts_initial
        else:
            self._sync(version, "abort")

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Let engines that share GPUs sleep after the block, in which they wake when completions are asked for.

        The ranks must not compute meanwhile, but for `rest`.
        """
        try:
            yield
        except BaseException:
            if self._memory.shared and self._memory.is_awake:
                self._sleep_after_failure()
            raise
        self.rest()

    def rest(self) -> None:
        """Let engines that share GPUs sleep until completions are asked for: the ranks need the memory."""
        if self._memory.shared and self._memory.is_awake:
            with self._at_rest():
                self._engines.poll(0)  # new processes of lost engines start while the ranks have left the GPUs
                self._engines.finish_starts()
                self._put_to_sleep()

    def _sleep_after_failure(self) -> None:
        """Let the engines release the memory: ranks that start again need it. Not all engines can answer."""
        self._engines.end(self._engines.lifecycle.within(State.STARTING))
        self._memory.sleep()
        with contextlib.suppress(Exception):
            self._engines.group.start("sleep")

    def _wake(self) -> None:
        self._offload_ranks(self._waking_bytes)
        self._engines.call(self._engines.lifecycle.serving, "wake")
        self._memory.wake()

    def _put_to_sleep(self) -> None:
        self._memory.sleep()
        self._waking_bytes = max(self._engines.call(self._engines.lifecycle.loaded, "sleep").values(), default=0)

    def _offload_ranks(self, needed: int = 0) -> None:
        """Let the ranks leave the GPUs that engines share, and check that `needed` bytes are free."""
        assigned = [assignment for assignment in self._assignments if assignment is not None]
        self._ranks.release_memory(needed, colocated_ranks(assigned, self._rank_placements))

    def _wait_for_engine(self) -> None:
        """Wait until an engine can get weights. While one starts on the GPU of a rank, the rank releases its memory."""
        if self._engines.lifecycle.loaded:
            return
        if not self._memory.shared:
            self._engines.wait_for_capacity()
            return
        self._offload_ranks()
        self._memory.start()
        try:
            self._engines.wait_for_capacity()
            self._engines.finish_starts()
        except BaseException:
            self._sleep_after_failure()
            raise
        self._put_to_sleep()

    async def _maintain(self, is_needed: bool) -> None:
        """Start new processes of lost engines, and give them weights, if that needs no rank.

        Args:
            is_needed: completions are waited for. If no engine is left, one must get weights now.

        Raises:
            WorkerError: the ranks may have newer weights, and nothing was kept.
        """
        engines = self._engines
        engines.poll(0)
        if not self._has_started:
            return
        is_kept = self._keeps_weights and (self._has_initial_weights or self._transport.kept is not None)
        if is_kept and (stale := engines.lifecycle.within(State.STALE)):
            await in_thread(self._reload, stale)
        if not is_needed or engines.lifecycle.serving:
            return
        if is_kept:
            await in_thread(engines.wait_for_capacity, lambda: self._engines.is_paused)
        elif self.loop.is_waited_for:
            await self.loop.on_main(self._refit)
        else:
            error = WorkerError(
                "no engine is left that has the weights of the rollouts under way, and the ranks train already: "
                "the run goes back to its last checkpoint",
                RESTART_HINT,
            )
            set_failure_source(error, FailureSource("engine"))
            raise error

    def _reload(self, stale: list[int]) -> None:
        """Give these engines the weights of the last sync again, without the ranks."""
        source = self._transport.kept
        if source is not None:
            arguments = self._arguments(source, self._version, "keep")
            digests = self._engines.call(stale, "sync_weights", *arguments)
            self._engines.mark_ready(self._proved(digests, self.weights_digest), self._version)
        elif self._has_initial_weights:
            self._engines.mark_ready(self._engines.call(stale, "set_version", self._version), self._version)

    def _arguments(self, source: Any, version: int, running: RunningRequests) -> tuple[Any, ...]:
        return (source, version, running) if self._spec.streaming else (source, version)

    def _refit(self) -> None:
        """Wait for an engine while requests wait, and give it the weights of the ranks: no other is left."""
        self._engines.wait_for_capacity()
        if self._memory.shared:
            self._engines.finish_starts()  # the ranks come back for the sync
            self._put_to_sleep()
        self._sync(self._version, "keep")
        if self._memory.shared:
            self._wake()

    async def complete(self, request: Request) -> Completion:
        """Return the completion of a request, on the event loop.

        Its tokens do not depend on who generates them, as long as the weights are the same.

        Raises:
            RequestsDropped: a weight sync has dropped the request.
            BaseException: whatever has failed for good.
        """
        return (await self.complete_together([request]))[0]

    async def complete_together(self, requests: Sequence[Request]) -> list[Completion]:
        """Return the completions of requests in their order, made in batches where that is the engines' `unit`."""

        def wake() -> None:
            with self._at_rest():
                self._wake()

        if not self._memory.is_awake:
            async with self._readying:
                if not self._memory.is_awake:
                    await self.loop.on_main(wake)
        return await self._engines.complete(requests)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        with self.awake():
            return self.loop.run(self.complete_together(requests))

    def sync_weights(self, version: int, running: RunningRequests = "abort") -> None:
        """Give all engines the policy's weights, and call them `version`, on the main thread.

        Engines that still load do not take part. They do not serve before the next sync, unless the weights are kept.

        Args:
            running: what happens to requests that are under way. After `abort`, those that wait for them get
                `RequestsDropped`.
        """
        with self._at_rest():
            self._sync(version, running)

    def _sync(self, version: int, running: RunningRequests) -> None:
        engines = self._engines
        if running == "abort":
            self.loop.call(self._engines.clear)
        engines.poll(0)
        engines.lifecycle.mark_stale(engines.lifecycle.loaded)
        self._wait_for_engine()
        assert self._memory.may_sync, "the ranks need the memory to send weights"
        if self._memory.shared:
            self._put_to_sleep()  # also those that are new
            self._offload_ranks(self._waking_bytes)  # sleeping engines wake their weights to take new ones
        receivers = engines.lifecycle.loaded
        if self._processes(receivers) != self._receivers:
            self._meet(receivers)
        with self._transport.offer() as (source, sending):
            arguments = self._arguments(source, version, running)
            if sending is None:
                digests, expected = engines.call(receivers, "sync_weights", *arguments), self._transport.digest
            else:
                digests, expected = self._receive(receivers, arguments, sending)
            ready = self._proved(digests, expected)
            engines.mark_ready(ready, version)
            self.weights_digest = expected or next((digests[engine] for engine in ready), None)
        self._waking_bytes = 0  # the weights are awake now, and the ranks have left enough for the rest
        self._version = version
        self._has_synced, self._has_initial_weights = True, False
        self.synced_bytes = self._transport.synced_bytes

    def _receive(
        self, receivers: Sequence[int], arguments: tuple[Any, ...], sending: CallFutures
    ) -> tuple[dict[int, Any], Any]:
        """Let engines take what the ranks send meanwhile; return the digests of engines, by number, and of ranks.

        An engine whose server does not take it from the engine is lost alone: the ranks have sent all to it.

        Raises:
            Exception: an engine or a rank failed. The others may wait for it without end: the engines are replaced.
        """
        receiving = _Receiving(self._engines.group)
        for engine in receivers:
            receiving.begin(engine, "sync_weights", *arguments)
        threads = ThreadPoolExecutor(2)
        try:
            with SIGNALS.waiting():  # the calls have time limits
                begun = [threads.submit(lambda: dict(receiving.completed())), threads.submit(sending.result)]
                for one in wait(begun, return_when=FIRST_EXCEPTION).done:
                    one.result()
            results, sent = (one.result() for one in begun)
            for engine, error in receiving.lost.items():
                self._engines.mark_failed([engine], error)
            return results, next(filter(None, sent), None)
        except Exception as error:
            failure: Exception = error
            if not self._has_synced and not isinstance(error, (UserError, WorkerError)):
                failure = WorkerError(  # most likely, the network is not set up
                    f"rollout.weight_sync={self._way}: the first weights did not reach the engines "
                    f"({describe_error(error)})",
                    "set NCCL_DEBUG=INFO to see what NCCL does, or choose rollout.weight_sync=shared_memory on one "
                    "node",
                    "weights",
                )
                if (origin := failure_source_of(error)) is not None:
                    set_failure_source(failure, origin)
            self._receivers = []
            self._engines.mark_failed(receivers, failure)
            raise failure from (error if failure is not error else None)
        finally:
            threads.shutdown(wait=False)

    def _proved(self, digests: Mapping[int, str | None], expected: str | None) -> list[int]:
        """Return the engines that have the weights of the ranks. The others are lost.

        Args:
            digests: what each engine says of the weights that it has loaded; None: it says nothing.
            expected: what the ranks say; None: nothing, so the engines must agree.
        """
        told = {digest for digest in digests.values() if digest is not None}
        if expected is None and len(told) == 1:
            (expected,) = told
        for engine, digest in digests.items():
            if digest not in (None, expected):
                name = f"{self._engines.group.name} {engine}"
                error = WorkerError(
                    f"{name} serves other weights than it was given: their digest is {digest}, and that of "
                    f"{'the ranks is ' + expected if expected else 'other engines differs'}",
                    RESTART_HINT,
                )
                set_failure_source(error, FailureSource(name))
                self._engines.mark_failed([engine], error)
        return [engine for engine, digest in sorted(digests.items()) if digest in (None, expected)]

    def shutdown(self) -> None:
        """End the engines. A failure is only logged: the run is finished, and the cluster ends their processes."""
        with self._at_rest():
            self.loop.call(self._engines.clear)
            if self._has_started:
                try:
                    self._transport.drop_kept()
                except Exception as error:  # no rank is left to free it
                    LOG.info("the kept weights: %s", describe_error(error))
            self._engines.shutdown()
            if self._fleet is not None:
                self._fleet.shutdown()
        self.leave()

    def leave(self) -> None:
        """End the event loop, and leave inference servers to other jobs. The cluster ends the engines."""
        self.loop.close()
        if self._fleet is not None:
            self._fleet.leave()
        if self._job is not None:
            from trainer.generation.server_engine import leave_servers  # imports httpx

            leave_servers(self._cfg.rollout.urls, self._job)

    def _meet(self, receivers: list[int]) -> None:
        colocated: tuple[int, ...] = ()
        if self._memory.shared:
            assigned = [assignment for engine in receivers if (assignment := self._assignments[engine]) is not None]
            colocated = colocated_ranks(assigned, self._rank_placements)
        self._transport.meet(len(receivers) * max(1, self._gpus), colocated)
        self._receivers = self._processes(receivers)

    def _processes(self, engines: Iterable[int]) -> list[Any]:
        return [self._engines.group.workers[engine] for engine in engines]

    def _assign_gpus(self) -> None:
        """Choose the GPUs of each engine among those that ranks have now.

        Raises:
            UserError: there are none for an engine that is to start first, or for any engine.
        """
        size, is_first = self._cfg.rollout.tensor_parallel_size, self._assignments == []
        count = self._cfg.rollout.num_engines
        self._rank_placements = self._ranks.policy.placements()
        self._assignments = assign_gpus(self._rank_placements, self._assignments or [None] * count, size)
        unplaced = self._assignments.count(None)
        if unplaced == count or is_first and unplaced:
            raise UserError(
                f"rollout.tensor_parallel_size={size}: ranks on one node have GPUs for only {count - unplaced} of "
                f"{count} engines; choose a size that divides the GPUs of a node, or a smaller rollout.num_engines"
            )
        if unplaced:
            LOG.warning("the ranks have GPUs for %d of %d engines", count - unplaced, count)

    def _follow_ranks(self) -> None:
        """End engines on GPUs that ranks have no more. They start on others, if there are some."""
        before = self._assignments
        self._assign_gpus()
        moved = [
            old is None or new is None or gpus_of(old) != gpus_of(new)
            for old, new in zip(before, self._assignments, strict=True)
        ]
        self._engines.end(engine for engine in self._engines.lifecycle.loaded if moved[engine])
        self._engines.unplaced = {engine for engine, assignment in enumerate(self._assignments) if assignment is None}

    def _choose_way(self, placements: Sequence[Mapping[str, Any]]) -> str:
        """Choose how weights reach the engines (see `choose_transport`). `placements`: of all ranks and engines."""
        if self._cfg.syncs_adapter:
            return ADAPTER
        same_node = len({placement["host"] for placement in placements}) == 1
        rollout = self._cfg.rollout
        if self._fleet is not None and rollout.weight_sync == "auto":  # engines join from anywhere, at any time
            rollout = replace(rollout, weight_sync="delta" if "delta" in self._spec.transports else "shared_memory")
        return choose_transport(rollout, same_node, self._device)
