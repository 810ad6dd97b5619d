"""How the policy's weights reach the engines: the choice, and the driver's side of each way."""

from __future__ import annotations

import functools
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from trainer.cluster.worker_groups import CallFutures
from trainer.config import Config, RolloutConfig
from trainer.config.engines import ENGINES, find_engine
from trainer.errors import UserError
from trainer.files.shared_memory import PrivateDirectory
from trainer.generation.weight_shards import ShardKeeper, Shards
from trainer.generation.weight_sync import Adapter, Broadcast, Ipc, SharedMemory, WeightSource
from trainer.models.files import weight_files
from trainer.models.weight_deltas import WeightsDigest, digest_of
from trainer.process import time_limits

if TYPE_CHECKING:
    from trainer.cluster.worker_groups import Cluster, WorkerGroup

BUCKET_BYTES = 256 * 2**20
"""Size of the buckets in which weights are sent by broadcast and ipc. Two are in memory at a time."""
_PREFIX = ".weights-"


class PolicyRanks(Protocol):
    """What engines need of the ranks that train the policy (see `trainer.learner.train_workers.TrainWorkers`)."""

    @property
    def policy(self) -> WorkerGroup: ...

    def call(self, role: str, method: str, *args: Any) -> Any: ...
    def call_one(self, role: str, method: str, *args: Any) -> Any: ...
    def start(self, role: str, method: str, *args: Any) -> CallFutures: ...
    def release_memory(self, needed: int = 0, colocated: Sequence[int] = ()) -> None: ...
    def check_shared(self, dtype: str) -> None: ...
    def share_weights(self, dtype: str) -> tuple[str, int]: ...
    def drop_shared(self) -> None: ...


@dataclass(frozen=True)
class Ends:
    """Both ends of a transport: the ranks of the policy, and the engines of a pool."""

    cfg: Config
    cluster: Cluster
    ranks: PolicyRanks
    model_path: str
    device: str  # of the engines
    keeps: bool = False
    """Engines may need the weights of the last sync again after the ranks have changed theirs."""
    token: str = field(default_factory=lambda: secrets.token_hex(16))  # a secret that both ends know


class Transport:
    """Sends the policy's weights to engines in one way. A base class; one is made whenever ranks have started."""

    is_checked = False
    """`check` finds all that cannot work. Else the first weights are sent before the first step, to try it."""
    kept: Any = None
    """What engines can load again without the ranks, until the next `offer`. None: nothing was kept."""
    digest: str | None = None
    """Of the last weights, as the ranks have sent them. None: no rank has seen them all."""

    def __init__(self, ends: Ends):
        self.ends = ends
        self._dtype = ends.cfg.rollout.dtype

    def check(self) -> None:
        """Refuse what cannot work, before the first step."""

    def meet(self, receivers: int, colocated: tuple[int, ...]) -> None:
        """Choose where ranks and engines meet. Called again when the processes of the engines are others.

        Args:
            receivers: number of processes of engines that take weights.
            colocated: the ranks that share a GPU with one of them.
        """

    def offer(self) -> AbstractContextManager[tuple[WeightSource, CallFutures | None]]:
        """Return what engines load, and the sending calls that run meanwhile; None: nothing is sent any more."""
        raise NotImplementedError

    def drop_kept(self) -> None:
        self.kept = None

    @functools.cached_property
    def synced_bytes(self) -> int:
        """Size of what the last sync has sent."""
        return self.ends.ranks.call_one("policy", "weight_bytes", self._dtype)


class SharedMemoryTransport(Transport):
    """The ranks write safetensors to memory of the node, and engines read them.

    With `Ends.keeps` the files stay there until the next sync.
    """

    is_checked = True

    def check(self) -> None:
        self.ends.ranks.check_shared(self._dtype)

    @contextmanager
    def offer(self) -> Iterator[tuple[WeightSource, None]]:
        self.kept = None  # the ranks delete the files before they write others
        path, total = self.ends.ranks.share_weights(self._dtype)
        source, self.digest = SharedMemory(path), str(WeightsDigest(total))
        try:
            yield source, None
            if self.ends.keeps:
                self.kept = source
        finally:
            if self.kept is None:
                self.ends.ranks.drop_shared()

    def drop_kept(self) -> None:
        if self.kept is not None:
            self.kept = None
            self.ends.ranks.drop_shared()


class StreamedTransport(Transport):
    """The ranks send while the engines receive. They meet at `transfer`."""

    transfer: Broadcast | Ipc

    @contextmanager
    def offer(self) -> Iterator[tuple[WeightSource, CallFutures]]:
        yield self.transfer, self.ends.ranks.start("policy", "send_weights", self.transfer, self._dtype)

    @property
    def _settings(self) -> dict[str, Any]:
        return {"device": self.ends.device, "timeout_s": time_limits.COLLECTIVE_S, "bucket_bytes": BUCKET_BYTES}


class BroadcastTransport(StreamedTransport):
    """Rank 0 sends to a group of the processes of all engines.

    Between GPUs, NCCL is much faster than host memory, but it cannot join two processes on one GPU.
    """

    def meet(self, receivers: int, colocated: tuple[int, ...]) -> None:
        address = self.ends.cluster.rendezvous_address(self.ends.ranks.policy)
        self.transfer = Broadcast(address, receivers=receivers, total_bytes=self.synced_bytes, **self._settings)


class DeltaTransport(Transport):
    """Each rank keeps its shards in host memory, and engines fetch what has changed, once for each node.

    The ranks serve them until the next sync, whatever they do meanwhile.
    """

    def meet(self, receivers: int, colocated: tuple[int, ...]) -> None:
        hosts = tuple(placement["host"] for placement in self.ends.ranks.policy.placements())
        self._keeper = ShardKeeper(self.ends.token, hosts, time_limits.HEARTBEAT_S)

    @contextmanager
    def offer(self) -> Iterator[tuple[WeightSource, None]]:
        self.kept = None
        offers = self.ends.ranks.start("policy", "keep_shards", self._keeper, self._dtype).result()
        source = Shards(self.ends.token, tuple(offers), time_limits.HEARTBEAT_S)
        self.synced_bytes = sum(offer.changed_bytes for offer in offers)
        yield source, None
        self.kept = source


class IpcTransport(StreamedTransport):
    """Each rank sends to the engine on its GPU."""

    def meet(self, receivers: int, colocated: tuple[int, ...]) -> None:
        self.transfer = Ipc(secrets.token_hex(16), colocated, **self._settings)


class AdapterTransport(Transport):
    """Adapters travel in one piece, stored once for all engines. They are small, and always kept."""

    synced_bytes = 0

    @contextmanager
    def offer(self) -> Iterator[tuple[Any, None]]:
        adapter = Adapter(self._config, self.ends.ranks.call("policy", "adapter_weights"))
        self.synced_bytes, self.digest = len(adapter.weights), digest_of(adapter.weights)
        self.kept = self.ends.cluster.put(adapter)
        yield self.kept, None

    @functools.cached_property
    def _config(self) -> str:
        return self.ends.ranks.call_one("policy", "adapter_config", self.ends.model_path)


class FixedWeights(Transport):
    """The weights in a directory, in place of those of a policy. They never change, and no ranks hold them.

    An engine that starts with the weights of its model path needs nothing more. An inference server, which is older
    than the job, gets a copy of the weight files; an engine that serves adapters gets these.

    Args:
        path: a Hugging Face model directory, on a disk that all nodes see.
        scratch: directory for the copy, on a disk that all nodes see.
        dtype: of the copy: `float32`, `bfloat16`, or `auto`: that of the files.
        adapter: peft's config and weights, for engines that serve them over the weights in `path`.
    """

    synced_bytes = 0
    _copy: PrivateDirectory | None = None

    def __init__(self, path: str, scratch: str, dtype: str, adapter: tuple[str, bytes] | None = None):
        self._path = path
        self._scratch = scratch
        self._dtype = dtype
        self._adapter = adapter
        self.is_checked = adapter is None

    @contextmanager
    def offer(self) -> Iterator[tuple[WeightSource, None]]:
        self.drop_kept()
        if self._adapter is not None:
            self.kept, self.synced_bytes = Adapter(*self._adapter), len(self._adapter[1])
            self.digest = digest_of(self._adapter[1])
        else:
            self.kept = SharedMemory(self._copied())
            self.synced_bytes = sum(map(os.path.getsize, weight_files(self._path)))
        yield self.kept, None

    def drop_kept(self) -> None:
        self.kept = None
        if self._copy is not None:
            self._copy.close()
            self._copy = None

    def _copied(self) -> str:
        """Copy the weight files, one at a time; return their directory.

        Raises:
            UserError: the weights are in no safetensors files.
        """
        import torch
        from safetensors.torch import load_file, save_file

        files = weight_files(self._path)
        if not files:
            raise UserError(
                f"model.path={self._path}: has no safetensors files, which inference servers load; save the model with "
                "safetensors, or choose rollout=vllm"
            )
        self._copy = PrivateDirectory(self._scratch, _PREFIX, 8)
        target = None if self._dtype == "auto" else getattr(torch, self._dtype)
        for file in files:
            tensors = {
                name: tensor.to(target) if target is not None and tensor.is_floating_point() else tensor
                for name, tensor in load_file(file).items()
            }
            save_file(tensors, os.path.join(self._copy.path, os.path.basename(file)), {"format": "pt"})
        return self._copy.path


TRANSPORTS: dict[str, type[Transport]] = {
    "ipc": IpcTransport,
    "delta": DeltaTransport,
    "broadcast": BroadcastTransport,
    "shared_memory": SharedMemoryTransport,
}
"""By the values of `rollout.weight_sync`. `auto` takes the first that suits, of those that the engine takes."""
ADAPTER = "adapter"  # the way of a policy whose adapters the engines serve (`rollout.lora_sync`)


def choose_transport(rollout: RolloutConfig, same_node: bool, device: str = "cpu") -> str:
    """Return how weights reach the engines: a key of `TRANSPORTS`.

    Args:
        same_node: all ranks and engines are on one node.
        device: of the engines.

    Raises:
        UserError: what `rollout.weight_sync` asks for cannot work for this engine or placement.
    """
    taken, way = find_engine(rollout.engine).transports, rollout.weight_sync
    on_gpus, colocated = device == "cuda", rollout.colocate
    suits = {  # `auto`
        "ipc": on_gpus and colocated,
        "delta": not same_node and not on_gpus,
        "broadcast": not same_node or on_gpus and not colocated,
        "shared_memory": same_node,
    }
    if way == "auto":
        suited = [name for name in TRANSPORTS if suits.get(name, True)]
        way = next((name for name in suited if name in taken), suited[-1])
    problem = None
    if way == "shared_memory" and not same_node:
        problem = "ranks and engines are on several nodes; choose auto or broadcast"
    elif way == "broadcast" and colocated:
        problem = "NCCL cannot join a rank and an engine on one GPU; use one node, or choose rollout.colocate=false"
    elif way == "ipc" and not suits["ipc"]:
        own = "weights go from rank to engine within one GPU, and they share none"
        problem = f"{own}; choose auto, or rollout.colocate=true on GPUs"
    if problem is not None:
        raise UserError(f"rollout.weight_sync={way}: {problem}")
    if way not in taken:
        able = " or ".join(engine for engine, spec in ENGINES.items() if way in spec.transports)
        raise UserError(
            f"rollout.weight_sync={way}: rollout.engine={rollout.engine} takes weights through {' or '.join(taken)} "
            f"only; use one node, or choose rollout={able}"
        )
    return way
