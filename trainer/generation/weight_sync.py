"""How the policy's weights reach the engines: through shared memory on one node, or by broadcast.

Shared memory: the ranks write safetensors to `/dev/shm`, each its own shards, and engines read them tensor by
tensor. Broadcast: rank 0 and the engines' workers form a group; the ranks gather one tensor at a time and
rank 0 sends it (NCCL on GPUs, gloo on CPUs). Neither way puts a second full copy of the model on a GPU. Adapters
(LoRA) are small, and travel as they are to engines that serve them.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.errors import UserError
from trainer.parallel.mesh import open_store


def choose(weight_sync: str, engine: str, same_node: bool, colocate: bool = False) -> str:
    """`shared_memory` or `broadcast`, for the setting `rollout.weight_sync`.

    Args:
        weight_sync: the setting; may be `auto`.
        engine: `rollout.engine`.
        same_node: all ranks and engines are on one node.
        colocate: engines share the GPUs of ranks.

    Raises:
        UserError: the way cannot work for this engine or placement.
    """
    if weight_sync == "auto":
        weight_sync = "shared_memory" if same_node else "broadcast"
    if weight_sync == "shared_memory" and not same_node:
        raise UserError("rollout.weight_sync=shared_memory: ranks and engines are on several nodes; choose broadcast")
    if weight_sync == "broadcast" and engine != "vllm":
        raise UserError(f"rollout.weight_sync=broadcast: rollout.engine={engine} takes weights through shared memory "
                        "only; use one node, or choose rollout=vllm")  # fmt: skip
    if weight_sync == "broadcast" and colocate:
        raise UserError("rollout.weight_sync=broadcast: NCCL cannot join a rank and an engine on one GPU; use one "
                        "node, or choose rollout.share_gpus=false")  # fmt: skip
    return weight_sync


@dataclass(frozen=True)
class SharedMemory:
    """Weights as safetensors files."""

    path: str
    """Directory on the engines' node."""


@dataclass(frozen=True)
class Broadcast:
    """Weights sent by rank 0. Ranks get this object to `send`, engines to receive, at the same time."""

    address: str
    """Where the group's store is (see `trainer.parallel.mesh.open_store`); rank 0 hosts it."""
    receivers: int
    """Workers of all engines together, each of which takes one place in the group."""
    device: str
    """`cuda` or `cpu`: where the tensors are."""
    timeout_s: float
    """How long one tensor, or the slowest member's arrival, may take."""

    def send(self, weights: Iterator[tuple[str, Tensor]], rank: int) -> None:
        """Send every (Hugging Face name, full tensor). A collective over the ranks.

        Every `next` of `weights` may be a collective, so all ranks step through it; rank 0 sends.
        """
        if rank == 0:
            _sending_end(self).send(weights)
        else:
            for _ in weights:
                pass


@dataclass(frozen=True)
class Adapter:
    """What the engine is to add to the weights that it was started with: peft's two files."""

    config: str
    weights: bytes


WeightSource = SharedMemory | Broadcast | Adapter


class Channel:
    """One member's end of a broadcast group; opening it waits for nobody but rank 0.

    The receivers' ranks in the group are given out in order of arrival. Names and shapes travel through the
    group's key-value store, once: they are the same in every sync.
    """

    def __init__(self, group: Broadcast, sender: bool):
        timeout = timedelta(seconds=group.timeout_s)
        self._store = open_store(group.address, sender, 1 + group.receivers, group.timeout_s)
        rank = 0 if sender else self._store.add("receivers", 1)
        assert rank <= group.receivers, f"more than {group.receivers} workers receive weights at {group.address}"
        self._device = group.device
        self._headers: list[str] = []
        if group.device == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group = dist.ProcessGroupNCCL(self._store, rank, 1 + group.receivers, options)
        else:
            self._group = dist.ProcessGroupGloo(self._store, rank, 1 + group.receivers, timeout)

    def send(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Send all of `weights` to all receivers."""
        count = 0
        for name, tensor in weights:
            self._announce(count, json.dumps([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]))
            self._group.broadcast(tensor.contiguous(), 0).wait()
            count += 1
        self._announce(count, "null")

    def receive(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) as they come in, until all of one `send` are there."""
        for i in itertools.count():
            header = json.loads(self._header(i))
            if header is None:
                return
            name, dtype, shape = header
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=self._device)
            self._group.broadcast(tensor, 0).wait()
            yield name, tensor

    def _announce(self, i: int, header: str) -> None:
        if i == len(self._headers):
            self._store.set(f"tensor{i}", header)
            self._headers.append(header)
        assert self._headers[i] == header, f"tensor {i} was {self._headers[i]} and is now {header}"

    def _header(self, i: int) -> str:
        if i == len(self._headers):
            self._headers.append(self._store.get(f"tensor{i}").decode())
        return self._headers[i]


@functools.cache
def _sending_end(group: Broadcast) -> Channel:
    """Opened at the first sync and kept: `group` itself reaches the process as a new copy at each sync."""
    return Channel(group, sender=True)
