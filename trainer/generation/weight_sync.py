"""How the policy's weights reach the engines: through shared memory on one node, by broadcast, or as adapters.

Shared memory: the ranks write safetensors to `/dev/shm`, each its own shards, and engines read them tensor by
tensor. Broadcast: rank 0 and the engines' workers form a group; the ranks gather one tensor at a time and
rank 0 sends it (NCCL on GPUs, gloo on CPUs). Neither puts a second full copy of the model on a GPU. Adapters
(LoRA) are small, and travel in one piece to engines that serve them.
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

from trainer.parallel.mesh import open_store


@dataclass(frozen=True)
class SharedMemory:
    """Weights as safetensors files."""

    path: str
    """Directory on the engines' node."""


@dataclass(frozen=True)
class Broadcast:
    """Weights sent by rank 0. Ranks get this object to `send`, engines to receive, at the same time."""

    address: str
    """Address of the group's store, which rank 0 hosts (see `trainer.parallel.mesh.open_store`)."""
    receivers: int
    """Number of workers of all engines. Each is a member of the group."""
    device: str
    """Device of the tensors: `cuda` or `cpu`."""
    timeout_s: float
    """Longest time for one tensor, and for all members to join."""

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
    """peft's two files. The engine adds the adapter to the weights that it was started with."""

    config: str
    weights: bytes


WeightSource = SharedMemory | Broadcast | Adapter


class Channel:
    """One member's end of a broadcast group. Opening it waits for rank 0 only.

    Receivers get their ranks in the group in the order in which they join. Names and shapes are written to the
    group's key-value store once, because they are the same in every sync.
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
        """Yield each (name, tensor) of one `send` as it arrives."""
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
    """Open the sending end at the first sync and keep it. `group` is a new copy in each sync."""
    return Channel(group, sender=True)
