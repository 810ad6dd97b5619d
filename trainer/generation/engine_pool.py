"""The engines of a run: started, given requests, and kept at the policy's weights."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from trainer.cluster.resources import gpus_per_engine
from trainer.cluster.worker_groups import CallFutures
from trainer.config import Config
from trainer.config.transports import ADAPTER, TransportSpec, find_transport
from trainer.errors import (
    RESTART_HINT,
    FailureSource,
    UserError,
    WorkerError,
    describe_error,
    set_failure_source,
)
from trainer.generation.colocation import GpuAssignment, assign_gpus, colocated_ranks, gpus_of
from trainer.generation.company import joins_exactly
from trainer.generation.config_check import describe_model
from trainer.generation.dispatcher import Dispatcher
from trainer.generation.engine import Completion, Request, RunningRequests
from trainer.generation.engines import Engines, engine_builder
from trainer.generation.lifecycle import GpuMemory, State
from trainer.generation.pauses import Pauses
from trainer.generation.request_stream import RequestStream, StreamAborted
from trainer.generation.server_protocol import Job
from trainer.generation.transport import Ends, PolicyRanks, Transport, choose_transport, first_failure, make_transport
from trainer.process import time_limits
from trainer.process.signals import SIGNALS

if TYPE_CHECKING:
    from trainer.cluster.worker_groups import Cluster

LOG = logging.getLogger(__name__)


class EnginePool:
    """Engines on `cluster` that divide the requests among them and follow the policy's weights.

    Construction returns while the engines start. If they share the GPUs of the ranks, the ranks may load nothing there
    before `wait_ready`. Who has the memory of shared GPUs, and when engines may start, sleep and get weights, is in
    `trainer.generation.lifecycle`.

    Args:
        ranks: those that train the policy.
        model_path: the initial weights of the engines, a local directory or Hub id.
        keeps_weights: engines generate while the ranks train. So the weights of the last sync are kept, if the way of
            the weights allows that: engines that come back get these.
        way: in which weights reach the engines. None: as `rollout.weight_sync` says.
        joins: generate as engines do whose requests join at any time others, even if those of this run do not.
    """

    def __init__(
        self,
        cfg: Config,
        cluster: Cluster,
        ranks: PolicyRanks,
        model_path: str,
        keeps_weights: bool = False,
        way: str | TransportSpec | None = None,
        joins: bool = False,
    ):
        self._cfg = cfg
        self._cluster = cluster
        self._ranks = ranks
        self._model_path = model_path
        self._version = 0
        self._keeps_weights = keeps_weights
        self._given_way = way
        self._has_initial_weights = False  # the weights of the policy are those that engines start with
        self._thread = threading.get_ident()  # the only one that may use the ranks
        self.synced_bytes = 0
        """Size of the weights or adapters of the last sync."""
        self.pauses = Pauses()
        """While no engine can generate."""
        self._waking_bytes = 0  # of each GPU; 0: not known
        self._spec = spec = cfg.engine
        self._gpus = gpus_per_engine(cfg, cluster.device)  # of each engine
        self._device = "cuda" if self._gpus else "cpu"  # of the engines
        self._awake_blocks: set[object] = set()
        self._memory = GpuMemory(cfg.rollout.colocate and self._gpus > 0)
        self._has_started = self._has_synced = False
        self._deferred: bool | None = None  # whether a start that is still to come has the initial weights
        self._assignments: list[GpuAssignment | None] = []
        if self._memory.shared:  # what cannot work is refused before the engines load
            self._assign_gpus()
            self._way = self._choose_way(self._rank_placements)
        assignment = self._assignment if self._memory.shared else None
        environment = spec.environment_on(self._device, cfg.trainer.deterministic)
        numbers = [(number,) for number in range(cfg.rollout.num_engines)]
        self._job: Job | None = None  # who uses inference servers
        if spec.served:
            self._job = Job.of_run(cfg.trainer.run_dir, describe_model(cfg.model, model_path, cfg.longest_sequence))
        self._build = engine_builder(cfg, model_path, self._device, joins or cfg.streams_requests, self._job)
        group = cluster.launch_engines(self._build, numbers, environment, assignment)
        window_s, has_capacity = 60 * cfg.trainer.restart_window_minutes, functools.partial(cluster.has_capacity, group)
        limit, urls = cfg.trainer.max_restarts, cfg.rollout.urls if spec.served else ()
        self._engines = Engines(group, self._memory, limit, window_s, has_capacity, urls)
        self._dispatcher = Dispatcher(
            self._engines,
            spec.streaming,
            cfg.rollout.max_num_seqs,
            self._device,
            cfg.trainer.deterministic,
            spec.in_flight,
            self._join,
            self.pauses.count()(self._refit),
        )
        self._ends = Ends(
            cfg, cluster, ranks, model_path, self._device, self._count_receivers, self._colocated_ranks, keeps_weights
        )
        self._receivers: list[Any] = []  # the processes of the engines that the transport reaches

    @property
    def repeats(self) -> bool:
        """Whether the engines generate the same tokens and log-probs again, to the last bit."""
        if self._cfg.streams_requests and not self._joins_exactly:
            return False
        return self._spec.repeats and (self._cluster.device == "cpu" or self._cfg.trainer.deterministic)

    @property
    def needs_company(self) -> bool:
        """Whether a request gets the same last bits again only beside the same requests (see `repeats`).

        Inference servers are asked each time: which engines they have is known only while they run.
        """
        if not self.repeats:
            return False
        if self._spec.served:
            from trainer.generation.server_engine import servers_join_exactly  # imports httpx

            return not servers_join_exactly(self._cfg.rollout.urls, time_limits.SERVER_CONNECT_S)
        return not self._joins_exactly

    @functools.cached_property
    def _joins_exactly(self) -> bool:
        return joins_exactly(self._spec, self._cfg, self._device, self._model_path)

    def wait_ready(self) -> None:
        """Wait until the ranks may load models on the GPUs. Once, before they do.

        An engine measures what is free while it starts, and takes its share. The ranks need that memory afterwards.
        """
        if self._memory.shared:
            self._engines.load()
            self._put_to_sleep()

    def start(self, version: int, is_initial: bool, may_defer: bool = False) -> None:
        """Wait for the engines, and bring them to the policy's weights. Again if the ranks have been started again.

        Args:
            version: of the policy's weights.
            is_initial: these are the initial weights, which new engines hold already.
            may_defer: all this may happen when completions are asked for. Then only this thread may ask for them.

        Raises:
            UserError: weights cannot reach the engines in the way that the config says.
        """
        self.abort()
        self._thread = threading.get_ident()
        self._version, self._deferred = version, is_initial
        if not may_defer or self._has_started:
            self._end_deferral()

    def _end_deferral(self) -> None:
        if self._deferred is None:
            return
        assert threading.get_ident() == self._thread, "another thread uses the ranks"
        is_initial, self._deferred = self._deferred, None
        with SIGNALS.waiting(), self.pauses.count(), self._dispatcher.turn():
            self._start(self._version, is_initial)

    def _start(self, version: int, is_initial: bool) -> None:
        if self._has_started or self._memory.shared:
            self._engines.check()
            if self._memory.shared:  # the ranks may have been started again on other GPUs
                self._follow_ranks()
            self._wait_for_engine()
        else:
            self._engines.load()
            self._way = self._given_way or self._choose_way(
                [*self._ranks.policy.placements(), *self._receiver_places()]
            )
        self._has_started = True
        self._transport: Transport = make_transport(find_transport(self._way), self._ends)
        self._transport.check()
        self._meet(self._engines.lifecycle.loaded)
        if is_initial and self._spec.holds_start_weights and self._transport.is_checked:
            self._engines.mark_ready(
                self._engines.call(self._engines.lifecycle.loaded, "set_version", version), version
            )
            self._version = version
            self._has_initial_weights = True
        else:
            self._sync(version, "abort")

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Keep engines that share GPUs awake while the block runs, so that its calls need not wake them each time.

        The ranks must not compute meanwhile. Blocks may overlap: the engines sleep after the last one, or after the
        first one that fails.
        """
        self._end_deferral()
        if not self._memory.shared:
            yield
            return
        if not self._awake_blocks:
            with self.pauses.count():
                self._wake()
        block = object()
        self._awake_blocks.add(block)
        try:
            with contextlib.suppress(GeneratorExit):  # the reader of a stream has closed it
                yield
            if self._awake_blocks == {block}:
                self._engines.finish_starts()
        except BaseException:
            if block in self._awake_blocks:
                self._awake_blocks.clear()
                self._sleep_after_failure()
            raise
        if self._awake_blocks == {block}:
            self._put_to_sleep()
        self._awake_blocks.discard(block)

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
        colocated = self._colocated_ranks(
            [engine for engine, assignment in enumerate(self._assignments) if assignment is not None]
        )
        self._ranks.release_memory(needed, colocated)

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
            with self._engines.starts():
                self._engines.wait_for_capacity()
        except BaseException:
            self._memory.sleep()
            raise
        self._put_to_sleep()

    def _join(self) -> None:
        """Give the weights of the last sync to engines that have come back, without the ranks."""
        if self._keeps_weights and (stale := self._engines.lifecycle.within(State.STALE)):
            self._reload(stale)

    def _reload(self, stale: list[int]) -> None:
        """Give these engines the weights of the last sync again, without the ranks, if they were kept."""
        source = self._transport.kept()
        if source is not None:
            arguments = (source, self._version, "keep") if self._spec.streaming else (source, self._version)
            self._engines.mark_ready(self._engines.call(stale, "sync_weights", *arguments), self._version)
        elif self._has_initial_weights:
            self._engines.mark_ready(self._engines.call(stale, "set_version", self._version), self._version)

    def _refit(self, gives_up: Callable[[], bool]) -> None:
        """Wait for an engine while requests wait, and give it the current weights: no other is left.

        Args:
            gives_up: returns whether to return before.

        Raises:
            WorkerError: the ranks may have newer weights, and nothing was kept.
        """
        is_kept = self._keeps_weights and (self._has_initial_weights or self._transport.kept() is not None)
        if not is_kept and threading.get_ident() != self._thread:
            error = WorkerError(
                "no engine is left that has the weights of the rollouts under way, and the ranks train already: the "
                "run goes back to its last checkpoint",
                RESTART_HINT,
            )
            set_failure_source(error, FailureSource("engine"))
            raise error
        self._engines.wait_for_capacity(gives_up)
        if not self._engines.lifecycle.loaded:
            return
        if is_kept:
            self._reload(self._engines.lifecycle.loaded)
            return
        if not self._memory.shared:
            self._sync(self._version, "keep")
            return
        self._engines.finish_starts()  # the ranks come back for the sync
        self._put_to_sleep()
        self._sync(self._version, "keep")
        self._wake()

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Return completions in the order of the requests."""
        completions = {index: one for chunk in self.stream(requests) for index, one in chunk.items()}
        return [completions[index] for index in range(len(requests))]

    def stream(
        self, requests: Sequence[Request], wanted: Collection[int] = (), idle_s: float = math.inf
    ) -> Iterator[dict[int, Completion]]:
        """Yield completions, by the indices of their requests, as engines complete them (see `Dispatcher.stream`).

        The tokens do not depend on who generates them, as long as the weights are the same. Any threads may read any
        number of streams, in any order: each gets the completions of its own requests. Only the thread that has called
        `start` may read while engines share the GPUs of the ranks.

        Raises:
            StreamAborted: `abort`, or a weight sync, has dropped the requests.
            BaseException: whatever has failed while one of the readers worked with the engines; on the main thread
                also what a signal asks for. All readers get it.
        """
        assert not self._memory.shared or threading.get_ident() == self._thread, "the ranks need the memory"
        with self.awake():
            yield from self._dispatcher.stream(requests, wanted, idle_s)

    def open_stream(self) -> RequestStream:
        """Return a stream that takes requests at any time, for one reader (see `RequestStream`). Close it.

        It fails as `stream` does. A weight sync that aborts ends it, also while it has no request.
        """
        assert not self._memory.shared or threading.get_ident() == self._thread, "the ranks need the memory"
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.awake())
            return self._dispatcher.open(stack.pop_all())

    def abort(self) -> None:
        """End all streams: readers on all threads get `StreamAborted`. They need not wait for an engine."""
        self._dispatcher.end(StreamAborted("the requests of this stream are no longer needed"))

    def sync_weights(self, version: int, running: RunningRequests = "abort") -> None:
        """Give all engines the policy's weights, and call them `version`. Only the thread of `start` may call this.

        Engines that still load do not take part. They do not serve before the next sync, unless the weights are kept.

        Args:
            running: what happens to requests of streams that are under way, on any thread. After `abort` their readers
                get `StreamAborted`.
        """
        assert threading.get_ident() == self._thread, "another thread uses the ranks"
        with self._dispatcher.turn(), self.pauses.count():
            if self._deferred is None:
                self._sync(version, running)
            else:
                self._version, self._deferred = version, False
                self._engines.poll(0)  # replaces those that have died

    def _sync(self, version: int, running: RunningRequests) -> None:
        engines = self._engines
        if running == "abort":
            self._dispatcher.clear()
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
            arguments = (source, version, running) if self._spec.streaming else (source, version)
            if sending is None:
                engines.mark_ready(engines.call(receivers, "sync_weights", *arguments), version)
            else:
                engines.mark_ready(self._receive(receivers, arguments, sending), version)
        self._waking_bytes = 0  # the weights are awake now, and the ranks have left enough for the rest
        self._version = version
        self._has_synced, self._has_initial_weights = True, False
        self.synced_bytes = self._transport.synced_bytes

    def _receive(self, receivers: Sequence[int], arguments: tuple[Any, ...], sending: CallFutures) -> list[int]:
        """Let engines take what the ranks send; return those that have it.

        Raises:
            Exception: an engine or a rank failed. The others may wait for it without end: the engines are replaced.
        """
        try:
            return self._engines.receive(receivers, arguments, sending)
        except Exception as error:
            failure = error if self._has_synced else first_failure(error, self._way)
            self._receivers = []
            self._engines.mark_failed(receivers, failure)
            raise failure from (error if failure is not error else None)

    def shutdown(self) -> None:
        """End the engines. A failure is only logged: the run is finished, and the cluster ends their processes."""
        self.abort()
        with self._dispatcher.turn():
            if self._has_started:
                try:
                    self._transport.drop_kept()
                except Exception as error:  # no rank is left to free it
                    LOG.info("the kept weights: %s", describe_error(error))
            self._engines.shutdown()
        self.leave()

    def leave(self) -> None:
        """Leave the inference servers, if there are some, to other jobs, as far as they answer soon. Raises nothing."""
        if self._job is not None:
            self._engines.leave(self._cfg.rollout.urls, self._job)

    def _meet(self, receivers: list[int]) -> None:
        self._transport.meet(receivers)
        self._receivers = self._processes(receivers)

    def _receiver_places(self) -> list[dict[str, Any]]:
        """Return the host of each process that takes weights, once the engines are loaded."""
        if not self._spec.names_receivers:
            return self._engines.placements()
        found = self._engines.call(self._engines.lifecycle.loaded, "receivers")
        return [{"host": host} for hosts in found.values() for host in hosts]

    def _count_receivers(self, engines: Sequence[int]) -> int:
        if not self._spec.names_receivers:
            return len(engines) * max(1, self._gpus)
        return sum(map(len, self._engines.call(engines, "receivers").values()))

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

    def _assignment(self, engine: int) -> GpuAssignment:
        assignment = self._assignments[engine]
        assert assignment is not None, f"engine {engine} has no GPUs"
        return assignment

    def _colocated_ranks(self, engines: Iterable[int]) -> tuple[int, ...]:
        """Return the ranks that share a GPU with one of these engines."""
        return colocated_ranks([self._assignment(engine) for engine in engines], self._rank_placements)

    def _choose_way(self, placements: Sequence[Mapping[str, Any]]) -> str | TransportSpec:
        """Choose how weights reach the engines (see `choose_transport`). `placements`: of all ranks and engines."""
        if self._cfg.syncs_adapter:
            return ADAPTER
        same_node = len({placement["host"] for placement in placements}) == 1
        return choose_transport(self._cfg.rollout, same_node, self._device)
