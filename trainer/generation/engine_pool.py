"""The engines of a run: started, given requests, and kept at the policy's weights."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from trainer.cluster.resources import rank_groups
from trainer.cluster.worker_groups import CallFutures
from trainer.config import Config, RolloutConfig
from trainer.config.engines import ENGINES
from trainer.errors import UserError, WorkerError, describe_error, failure_source_of, set_failure_source
from trainer.generation.colocation import GpuAssignment, choose_homes, gpus_of, ranks_beside
from trainer.generation.engine import Completion, Engine, Request, Sampling
from trainer.generation.engines import Engines
from trainer.generation.request_scheduler import RequestScheduler, share_out
from trainer.generation.weight_sync import Adapter, Broadcast, Ipc, SharedMemory, WeightSource
from trainer.process.signals import SIGNALS

if TYPE_CHECKING:
    from trainer.cluster.worker_groups import Cluster, WorkerGroup

LOG = logging.getLogger(__name__)

_CHANNELS = ("broadcast", "ipc")


class PolicyRanks(Protocol):
    """The ranks of the policy, as far as engines need them (see `trainer.learner.train_workers.TrainWorkers`)."""

    @property
    def policy(self) -> WorkerGroup: ...

    def call(self, role: str, method: str, *args: Any) -> Any: ...

    def call_one(self, role: str, method: str, *args: Any) -> Any: ...

    def start(self, role: str, method: str, *args: Any) -> CallFutures: ...

    def release_memory(self, needed: int = 0, beside: Sequence[int] = ()) -> None: ...

    def check_shared(self, dtype: str) -> None: ...

    def share_weights(self, dtype: str) -> str: ...

    def drop_shared(self) -> None: ...


class EnginePool:
    """Engines on `cluster` that share out the requests and hold one version of the policy's weights.

    Construction returns while the engines start. If they share the GPUs of the ranks, the ranks may load nothing there
    before `settle`.

    Args:
        ranks: those that train the policy.
        model_path: the start weights of the engines, a local directory or Hub id.
    """

    def __init__(self, cfg: Config, cluster: Cluster, ranks: PolicyRanks, model_path: str):
        self._cfg = cfg
        self._cluster = cluster
        self._ranks = ranks
        self._model_path = model_path
        self._version = 0
        self._transports = {
            "adapter": self._offer_adapter,
            "broadcast": self._offer_channel,
            "ipc": self._offer_channel,
            "shared_memory": self._offer_shared_memory,
        }
        self.synced_bytes = 0
        """Size of the weights or adapters of the last sync."""
        self._is_awake = False
        self._waking_bytes = 0  # of each GPU; 0: not known
        self._spec = spec = ENGINES[cfg.rollout.engine]
        build = functools.partial(
            _build_engine,
            spec.path,
            cfg.trainer.deterministic and spec.deterministic_torch,
            model_path,
            dtype=cfg.rollout.dtype,
            seed=cfg.trainer.seed,
            rollout=cfg.rollout,
            device=cluster.device,
            trust_remote_code=cfg.model.trust_remote_code,
            **({"lora_rank": cfg.trainer.policy.lora.rank} if cfg.syncs_adapter else {}),
        )
        self._shares_gpus = cfg.rollout.colocate and cluster.device == "cuda"
        self._has_started = False
        self._has_synced = False
        self._homes: list[GpuAssignment | None] = []
        if self._shares_gpus:  # what cannot work is refused before the engines load
            self._choose_homes()
            self._transport = self._choose_transport(self._rank_places)
        home = self._home if self._shares_gpus else None
        environment = spec.environment_on(cluster.device, cfg.trainer.deterministic)
        group = cluster.launch_engines(build, (), environment, home)
        window_s, has_room = 60 * cfg.trainer.restart_window_minutes, functools.partial(cluster.has_capacity, group)
        self._engines = Engines(group, cfg.trainer.max_restarts, window_s, has_room)
        self._channel_number = 0
        self._receivers: list[Any] = []  # the processes of the engines that the channel of the weights joins

    def settle(self) -> None:
        """Wait until the ranks may load models on the GPUs. Once, before they do.

        An engine measures what is free while it starts, and takes its share. The ranks need that room afterwards.
        """
        if self._shares_gpus:
            self._engines.load()
            self._put_to_sleep()
            self._engines.may_start = False

    def start(self, version: int, fresh: bool) -> None:
        """Wait for the engines, and bring them to the policy's weights. Again if the ranks have been started again.

        Args:
            version: of the policy's weights.
            fresh: these are the start weights, which the engines hold already.

        Raises:
            UserError: weights cannot reach the engines in the way that the config says.
        """
        if self._has_started or self._shares_gpus:
            self._engines.check()
            if self._shares_gpus:  # the ranks may have been started again on other GPUs
                self._follow_ranks()
            self._wait_for_engine()
        else:
            self._engines.load()
            self._transport = self._choose_transport([*self._ranks.policy.placements(), *self._engines.placements()])
        self._has_started, self._is_awake, self._receivers = True, False, []
        if self._transport in _CHANNELS:
            self._channel_number = 0
            self._open_channel(self._engines.life.loaded)
        elif self._transport == "shared_memory":
            self._ranks.check_shared(self._cfg.rollout.dtype)  # now, not after the first step
        if fresh and self._transport == "shared_memory":  # what else cannot work must fail before the first step
            self._engines.serve(self._engines.call(self._engines.life.loaded, "set_version", version))
            self._version = version
        else:
            self.sync_weights(version)

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Keep engines that share GPUs awake while the block runs, so that its calls need not wake them each time.

        The ranks must not compute meanwhile.
        """
        if self._is_awake or not self._shares_gpus:
            yield
            return
        self._wake()
        try:
            with self._engines.starts():
                yield
        except BaseException:
            self._is_awake = False
            with contextlib.suppress(Exception):
                self._engines.group.start("sleep")  # ranks that start again need the memory; not all can answer
            raise
        self._put_to_sleep()

    def _wake(self) -> None:
        self._make_room(self._waking_bytes)
        self._engines.call(self._engines.life.serving, "wake")
        self._is_awake = True

    def _put_to_sleep(self) -> None:
        self._is_awake = False
        self._waking_bytes = max(self._engines.call(self._engines.life.loaded, "sleep").values(), default=0)

    def _make_room(self, needed: int = 0) -> None:
        """Let the ranks leave the GPUs that engines share, and check that there is room for `needed` bytes."""
        beside = self._beside([engine for engine, home in enumerate(self._homes) if home is not None])
        self._ranks.release_memory(needed, beside)

    def _wait_for_engine(self) -> None:
        """Wait until an engine can get weights. While one starts on the GPU of a rank, the rank leaves room for it."""
        if self._engines.life.loaded:
            return
        if not self._shares_gpus:
            self._engines.pause()
            return
        self._make_room()
        with self._engines.starts():
            self._engines.pause()

    def _refit(self) -> None:
        """Wait for an engine while requests wait, and give it the current weights: no other is left."""
        engines = self._engines
        engines.pause()
        if not self._shares_gpus:
            self.sync_weights(self._version)
            return
        engines.finish_starts()  # the ranks come back for the sync
        self._put_to_sleep()
        engines.may_start = False
        self.sync_weights(self._version)
        self._wake()
        engines.may_start = True

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Return completions in the order of the requests."""
        completions = {place: one for part in self.stream(requests, sampling) for place, one in part.items()}
        return [completions[place] for place in range(len(requests))]

    def stream(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[dict[int, Completion]]:
        """Yield all completions, by the places of their requests, as engines complete them.

        An engine that is done early takes from what is left, and the requests of one that is lost go to the others. The
        tokens do not depend on who generates them.
        """
        engines = self._engines
        with self.awake():
            feed, calls = self._feed(requests, sampling.max_tokens), CallFutures(engines.group)
            given: dict[int, list[int]] = {}
            busy: set[int] = set()
            while True:
                feed.replan({*engines.life.serving, *busy})
                idle = [engine for engine in engines.life.serving if engine not in busy]
                given |= (more := feed.take(idle))
                for engine, places in more.items():
                    self._advance(calls, engine, places, requests, sampling)
                    busy.add(engine)
                if not busy and not feed.is_waiting:
                    return
                if not busy:
                    self._refit()
                for engine, result, error in calls.poll():
                    busy.discard(engine)
                    if error is not None:
                        engines.lose([engine], error)
                        feed.give_back(engine)
                        continue
                    part = result if self._spec.streaming else dict(zip(given[engine], result, strict=True))
                    stale = {one.weight_version for one in part.values()} - {self._version}
                    assert not stale, f"completions of weights {stale}, expected {self._version}"
                    has_more = feed.complete(engine, part)
                    given |= (more := feed.take([engine]))
                    if has_more or more:
                        self._advance(calls, engine, more.get(engine, []), requests, sampling)
                        busy.add(engine)
                    yield part
                engines.advance(0)

    def _feed(self, requests: Sequence[Request], max_tokens: int) -> RequestScheduler:
        count, most = len(self._engines.group), self._cfg.rollout.max_num_seqs
        # Then time does not decide which requests run together, or where.
        planned = self._engines.life.serving if self._cfg.trainer.deterministic else ()
        return share_out(requests, max_tokens, count, most, self._spec.streaming, self._cluster.device, planned)

    def _advance(
        self, calls: CallFutures, engine: int, places: Sequence[int], requests: Sequence[Request], sampling: Sampling
    ) -> None:
        if self._spec.streaming:
            calls.begin(engine, "advance", {place: requests[place] for place in places}, sampling)
        else:
            calls.begin(engine, "generate", [requests[place] for place in places], sampling)

    def sync_weights(self, version: int) -> None:
        """Give all engines the policy's weights, and call them `version`.

        Engines that still load do not take part, and do not serve before the next sync.
        """
        engines = self._engines
        engines.advance(0)
        engines.life.outdate(engines.life.loaded)
        self._wait_for_engine()
        if self._shares_gpus:
            assert not self._is_awake, "the ranks need the memory to send weights"
            self._put_to_sleep()  # also those that are new
            self._make_room(self._waking_bytes)  # sleeping engines wake their weights to take new ones
        receivers = engines.life.loaded
        if self._transport in _CHANNELS and self._processes(receivers) != self._receivers:
            self._open_channel(receivers)
        with self._transports[self._transport]() as (source, sending):
            if sending is None:
                engines.serve(engines.call(receivers, "sync_weights", source, version))
            else:
                self._receive(receivers, source, version, sending)
        self._waking_bytes = 0  # the weights are awake now, and there is room for the rest
        self._version = version
        self._has_synced = True
        if self._transport != "adapter":
            self.synced_bytes = self._weight_bytes

    def _receive(self, receivers: Sequence[int], source: WeightSource, version: int, sending: CallFutures) -> None:
        """Let engines take what the ranks send.

        Raises:
            Exception: an engine or a rank failed. The others may wait for it in vain: the engines are replaced.
        """
        receiving = CallFutures(self._engines.group)
        for engine in receivers:
            receiving.begin(engine, "sync_weights", source, version)
        try:
            _wait_for_all(receiving.result, sending.result)
        except Exception as error:
            failure = error if self._has_synced else self._first_failure(error)
            self._receivers = []
            self._engines.lose(receivers, failure)
            raise failure from (error if failure is not error else None)
        self._engines.serve(receivers)

    def _first_failure(self, error: Exception) -> Exception:
        """Return what to raise if the first weights cannot be sent: most likely, the network is not set up."""
        if isinstance(error, (UserError, WorkerError)):
            return error
        failure = WorkerError(
            f"rollout.weight_sync={self._transport}: the first weights did not reach the engines "
            f"({describe_error(error)})",
            "set NCCL_DEBUG=INFO to see what NCCL does, or choose rollout.weight_sync=shared_memory on one node",
            "weights",
        )
        if (origin := failure_source_of(error)) is not None:
            set_failure_source(failure, origin)
        return failure

    def shutdown(self) -> None:
        """End the engines. A failure is only logged: the run is finished, and the cluster ends their processes."""
        self._engines.shutdown()

    def _open_channel(self, receivers: list[int]) -> None:
        """Choose a new meeting place for the ranks and these engines."""
        r, device, first = self._cfg.rollout, self._cluster.device, self._cfg.trainer.master_port
        settings = {
            "device": device,
            "timeout_s": self._cfg.trainer.collective_timeout_s,
            "bucket_bytes": r.weight_sync_bucket_mb * 2**20,
        }
        if self._transport == "ipc":
            self._channel: Broadcast | Ipc = Ipc(secrets.token_hex(16), self._beside(receivers), **settings)
        else:
            settings["receivers"] = len(receivers) * (r.tensor_parallel_size if device == "cuda" else 1)
            is_first = self._channel_number == 0  # the port of an earlier channel is still in use
            port = first + rank_groups(self._cfg) if first and is_first else 0
            self._channel = Broadcast(self._cluster.rendezvous_address(self._ranks.policy, port), **settings)
        self._channel_number += 1
        self._receivers = self._processes(receivers)

    def _processes(self, engines: Iterable[int]) -> list[Any]:
        return [self._engines.group.workers[engine] for engine in engines]

    def _choose_homes(self) -> None:
        """Choose the GPUs of each engine among those that ranks have now.

        Raises:
            UserError: there are none for an engine that is to start first, or for any engine.
        """
        size, is_first = self._cfg.rollout.tensor_parallel_size, self._homes == []
        count = self._cfg.rollout.num_engines
        self._rank_places = self._ranks.policy.placements()
        self._homes = choose_homes(self._rank_places, self._homes or [None] * count, size)
        homeless = self._homes.count(None)
        if homeless == count or is_first and homeless:
            raise UserError(
                f"rollout.tensor_parallel_size={size}: ranks on one node have GPUs for only {count - homeless} of "
                f"{count} engines; choose a size that divides the GPUs of a node, or a smaller rollout.num_engines"
            )
        if homeless:
            LOG.warning("the ranks have GPUs for %d of %d engines", count - homeless, count)

    def _follow_ranks(self) -> None:
        """End engines on GPUs that ranks have no more. They start on others, if there are some."""
        before = self._homes
        self._choose_homes()
        moved = [
            old is None or new is None or gpus_of(old) != gpus_of(new)
            for old, new in zip(before, self._homes, strict=True)
        ]
        self._engines.end(engine for engine in self._engines.life.loaded if moved[engine])
        self._engines.homeless = {engine for engine, home in enumerate(self._homes) if home is None}

    def _home(self, engine: int) -> GpuAssignment:
        home = self._homes[engine]
        assert home is not None, f"engine {engine} has no GPUs"
        return home

    def _beside(self, engines: Iterable[int]) -> tuple[int, ...]:
        """Return the ranks that share a GPU with one of these engines."""
        return ranks_beside([self._home(engine) for engine in engines], self._rank_places)

    def _choose_transport(self, places: Sequence[Mapping[str, Any]]) -> str:
        """Choose how weights reach the engines (see `choose_transport`). `places`: of all ranks and engines."""
        if self._cfg.syncs_adapter:
            return "adapter"
        same_node = len({place["host"] for place in places}) == 1
        return choose_transport(self._cfg.rollout, same_node, self._cluster.device)

    # What engines load, and the sending side that must run at the same time, if there is one.

    @contextmanager
    def _offer_shared_memory(self) -> Iterator[tuple[WeightSource, None]]:
        path = self._ranks.share_weights(self._cfg.rollout.dtype)
        try:
            yield SharedMemory(path), None
        finally:
            self._ranks.drop_shared()

    @contextmanager
    def _offer_channel(self) -> Iterator[tuple[WeightSource, CallFutures]]:
        yield self._channel, self._ranks.start("policy", "send_weights", self._channel, self._cfg.rollout.dtype)

    @contextmanager
    def _offer_adapter(self) -> Iterator[tuple[Any, None]]:
        adapter = Adapter(self._adapter_config, self._ranks.call("policy", "adapter_weights"))
        self.synced_bytes = len(adapter.weights)
        yield self._cluster.put(adapter), None  # stored once for all engines

    @functools.cached_property
    def _weight_bytes(self) -> int:
        return self._ranks.call_one("policy", "weight_bytes", self._cfg.rollout.dtype)

    @functools.cached_property
    def _adapter_config(self) -> str:
        return self._ranks.call_one("policy", "adapter_config", self._model_path)


def _build_engine(path: str, deterministic: bool, *args: Any, **kwargs: Any) -> Engine:
    """Runs in the engine's process, so that the driver need not import engines, which takes seconds."""
    if deterministic:
        from trainer.parallel.determinism import use_deterministic_kernels

        use_deterministic_kernels(warn_only=True)  # `top_p` adds up probabilities, which has no such kernel
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)(*args, **kwargs)


def choose_transport(rollout: RolloutConfig, same_node: bool, device: str = "cpu") -> str:
    """Return how weights reach the engines: `shared_memory`, `broadcast` or `ipc`.

    Args:
        same_node: all ranks and engines are on one node.
        device: of ranks and engines.

    Raises:
        UserError: what `rollout.weight_sync` asks for cannot work for this engine or placement.
    """
    weight_sync, on_gpus = rollout.weight_sync, device == "cuda"
    if weight_sync == "auto":
        # Between GPUs, NCCL is much faster than host memory, but it cannot join two processes on one GPU.
        fast = "ipc" if rollout.colocate else "broadcast"
        if on_gpus and fast in ENGINES[rollout.engine].transports:
            weight_sync = fast
        else:
            weight_sync = "shared_memory" if same_node else "broadcast"
    if weight_sync == "ipc" and not (on_gpus and rollout.colocate):
        raise UserError(
            "rollout.weight_sync=ipc: weights go from rank to engine within one GPU, and they share none; choose auto, "
            "or rollout.colocate=true on GPUs"
        )
    if weight_sync == "shared_memory" and not same_node:
        raise UserError(
            "rollout.weight_sync=shared_memory: ranks and engines are on several nodes; choose auto or broadcast"
        )
    if weight_sync not in ENGINES[rollout.engine].transports:
        able = " or ".join(name for name, spec in ENGINES.items() if weight_sync in spec.transports)
        raise UserError(
            f"rollout.weight_sync={weight_sync}: rollout.engine={rollout.engine} takes weights through "
            f"{' or '.join(ENGINES[rollout.engine].transports)} only; use one node, or choose rollout={able}"
        )
    if weight_sync == "broadcast" and rollout.colocate:
        raise UserError(
            "rollout.weight_sync=broadcast: NCCL cannot join a rank and an engine on one GPU; use one node, or choose "
            "rollout.colocate=false"
        )
    return weight_sync


def _wait_for_all(*waits: Callable[[], Any]) -> None:
    """Wait for all, or for the first that raises, and raise that."""
    threads = ThreadPoolExecutor(len(waits))
    try:
        with SIGNALS.waiting():  # the calls have time limits
            done, _ = wait([threads.submit(one) for one in waits], return_when=FIRST_EXCEPTION)
        for one in done:
            one.result()
    finally:
        threads.shutdown(wait=False)
