"""How the policy's weights reach the engines: the choice, and the driver's side of each way."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from trainer.cluster.worker_groups import CallFutures
from trainer.config import Config, RolloutConfig
from trainer.config.engines import ENGINES, TRANSPORTS, Place, TransportSpec, find_engine, find_transport
from trainer.errors import UserError, WorkerError, describe_error, failure_source_of, set_failure_source
from trainer.generation.weight_sync import Adapter, Broadcast, Ipc, SharedMemory, WeightSource
from trainer.import_utils import import_function
from trainer.process import time_limits
from trainer.process.signals import SIGNALS

if TYPE_CHECKING:
    from trainer.cluster.worker_groups import Cluster, WorkerGroup

BUCKET_BYTES = 256 * 2**20
"""Size of the buckets in which weights are sent by broadcast and ipc. Two are in memory at a time."""


class PolicyRanks(Protocol):
    """The ranks of the policy, as far as engines need them (see `trainer.learner.train_workers.TrainWorkers`)."""

    @property
    def policy(self) -> WorkerGroup: ...

    def call(self, role: str, method: str, *args: Any) -> Any: ...

    def call_one(self, role: str, method: str, *args: Any) -> Any: ...

    def start(self, role: str, method: str, *args: Any) -> CallFutures: ...

    def release_memory(self, needed: int = 0, colocated: Sequence[int] = ()) -> None: ...

    def check_shared(self, dtype: str) -> None: ...

    def share_weights(self, dtype: str) -> str: ...

    def drop_shared(self) -> None: ...


@dataclass(frozen=True)
class Ends:
    """Both ends of a transport: the ranks of the policy, and the engines of a pool."""

    cfg: Config
    cluster: Cluster
    ranks: PolicyRanks
    model_path: str
    device: str
    """Of the engines."""
    count_receivers: Callable[[Sequence[int]], int]
    """Returns the number of processes of these engines that take weights."""
    colocated_ranks: Callable[[Sequence[int]], tuple[int, ...]]
    """Returns the ranks that share a GPU with one of these engines."""
    keeps: bool = False
    """Engines may need the weights of the last sync again after the ranks have changed theirs."""


class Transport:
    """Sends the policy's weights to engines in one way. A base class; one is made whenever ranks have started."""

    is_checked = False
    """`check` finds all that cannot work. Else the first weights are sent before the first step, to try it."""

    def __init__(self, ends: Ends):
        self.ends = ends
        self._dtype = ends.cfg.rollout.dtype

    def check(self) -> None:
        """Refuse what cannot work, before the first step."""

    def meet(self, engines: Sequence[int]) -> None:
        """Choose where ranks and these engines meet. Called again when the processes of the engines are others."""

    def offer(self) -> AbstractContextManager[tuple[WeightSource, CallFutures | None]]:
        """Return what engines load, and the sending calls that run meanwhile; None: nothing is sent any more."""
        raise NotImplementedError

    def kept(self) -> WeightSource | None:
        """Return what engines can load again without the ranks, until the next `offer`. None: nothing was kept."""
        return None

    def drop_kept(self) -> None:
        """Free what `kept` returns."""

    @functools.cached_property
    def synced_bytes(self) -> int:
        """Size of what the last sync has sent."""
        return self.ends.ranks.call_one("policy", "weight_bytes", self._dtype)


class SharedMemoryTransport(Transport):
    """The ranks write safetensors to memory of the node, and engines read them.

    With `Ends.keeps` the files stay there until the next sync.
    """

    is_checked = True
    _kept: SharedMemory | None = None

    def check(self) -> None:
        self.ends.ranks.check_shared(self._dtype)

    @contextmanager
    def offer(self) -> Iterator[tuple[WeightSource, None]]:
        self._kept = None  # the ranks delete the files before they write others
        source = SharedMemory(self.ends.ranks.share_weights(self._dtype))
        try:
            yield source, None
            if self.ends.keeps:
                self._kept = source
        finally:
            if self._kept is None:
                self.ends.ranks.drop_shared()

    def kept(self) -> SharedMemory | None:
        return self._kept

    def drop_kept(self) -> None:
        if self._kept is not None:
            self._kept = None
            self.ends.ranks.drop_shared()


class StreamedTransport(Transport):
    """The ranks send while the engines receive. They meet at `transfer`."""

    transfer: Broadcast | Ipc

    @contextmanager
    def offer(self) -> Iterator[tuple[WeightSource, CallFutures]]:
        yield self.transfer, self.ends.ranks.start("policy", "send_weights", self.transfer, self._dtype)

    @property
    def _settings(self) -> dict[str, Any]:
        return {
            "device": self.ends.device,
            "timeout_s": time_limits.COLLECTIVE_S,
            "bucket_bytes": BUCKET_BYTES,
        }


class BroadcastTransport(StreamedTransport):
    """Rank 0 sends to a group of the processes of all engines."""

    def meet(self, engines: Sequence[int]) -> None:
        ends = self.ends
        address = ends.cluster.rendezvous_address(ends.ranks.policy)
        receivers = ends.count_receivers(engines)
        self.transfer = Broadcast(address, receivers=receivers, total_bytes=self.synced_bytes, **self._settings)


class IpcTransport(StreamedTransport):
    """Each rank sends to the engine on its GPU."""

    def meet(self, engines: Sequence[int]) -> None:
        self.transfer = Ipc(secrets.token_hex(16), self.ends.colocated_ranks(engines), **self._settings)


class AdapterTransport(Transport):
    """Adapters travel in one piece, stored once for all engines. They are small, and always kept."""

    synced_bytes = 0
    _kept: Any = None

    @contextmanager
    def offer(self) -> Iterator[tuple[Any, None]]:
        adapter = Adapter(self._config, self.ends.ranks.call("policy", "adapter_weights"))
        self.synced_bytes = len(adapter.weights)
        self._kept = self.ends.cluster.put(adapter)
        yield self._kept, None

    def kept(self) -> Any:
        return self._kept

    def drop_kept(self) -> None:
        self._kept = None

    @functools.cached_property
    def _config(self) -> str:
        return self.ends.ranks.call_one("policy", "adapter_config", self.ends.model_path)


BUILT_IN: dict[str, type[Transport]] = {
    "ipc": IpcTransport,
    "broadcast": BroadcastTransport,
    "shared_memory": SharedMemoryTransport,
    "adapter": AdapterTransport,
}


def make_transport(spec: TransportSpec, ends: Ends) -> Transport:
    """Return a new transport."""
    return (
        BUILT_IN[spec.path](ends) if spec.path in BUILT_IN else import_function(spec.path, "rollout.weight_sync")(ends)
    )


def choose_transport(rollout: RolloutConfig, same_node: bool, device: str = "cpu") -> str | TransportSpec:
    """Return how weights reach the engines, as `find_transport` takes it.

    Args:
        same_node: all ranks and engines are on one node.
        device: of the engines.

    Raises:
        UserError: what `rollout.weight_sync` asks for cannot work for this engine or placement.
    """
    ways, place = find_engine(rollout.engine).transports, Place(same_node, device == "cuda", rollout.colocate)
    taken = [find_transport(way) for way in ways]
    way: str | TransportSpec = rollout.weight_sync
    if way == "auto":
        own = [way for way in ways if way not in TRANSPORTS]
        suited = [way for way in (*own, *TRANSPORTS) if find_transport(way).suits(place)]
        way = next((way for way in suited if find_transport(way) in taken), suited[-1])
    if (problem := find_transport(way).problem(place)) is not None:
        raise UserError(f"rollout.weight_sync={name_of(way)}: {problem}")
    if find_transport(way) not in taken:
        able = " or ".join(engine for engine, spec in ENGINES.items() if way in spec.transports)
        remedy = f"use one node, or choose rollout={able}" if able else "choose one of these, or auto"
        raise UserError(
            f"rollout.weight_sync={name_of(way)}: rollout.engine={rollout.engine} takes weights through "
            f"{' or '.join(map(name_of, ways))} only; {remedy}"
        )
    return way


def name_of(way: str | TransportSpec) -> str:
    """Return a transport as messages call it."""
    return way if isinstance(way, str) else way.path


def first_failure(error: Exception, way: str | TransportSpec) -> Exception:
    """Return what to raise if the first weights cannot be sent: most likely, the network is not set up."""
    if isinstance(error, (UserError, WorkerError)):
        return error
    failure = WorkerError(
        f"rollout.weight_sync={name_of(way)}: the first weights did not reach the engines ({describe_error(error)})",
        "set NCCL_DEBUG=INFO to see what NCCL does, or choose rollout.weight_sync=shared_memory on one node",
        "weights",
    )
    if (origin := failure_source_of(error)) is not None:
        set_failure_source(failure, origin)
    return failure


def wait_for_all(*waits: Callable[[], Any]) -> None:
    """Wait for all, or for the first that raises, and raise that."""
    threads = ThreadPoolExecutor(len(waits))
    try:
        with SIGNALS.waiting():  # the calls have time limits
            done, _ = wait([threads.submit(one) for one in waits], return_when=FIRST_EXCEPTION)
        for one in done:
            one.result()
    finally:
        threads.shutdown(wait=False)
