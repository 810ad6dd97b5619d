"""How the policy's weights reach the engines.

- Shared memory: the ranks write safetensors to `/dev/shm`, each its own shards, and engines read them tensor by tensor.
- Broadcast: rank 0 and the engines' workers form a group; the ranks gather one tensor at a time and rank 0 sends it
  (NCCL on GPUs, gloo on CPUs).
- IPC: a rank and a worker share a GPU. The ranks gather one tensor at a time, and each worker copies it from the memory
  of its own rank, on the GPU.
- Adapters (LoRA) are small, and travel in one piece to engines that serve them.

Broadcast and IPC send buckets of one size. The ranks gather the tensors of the next bucket while one travels. None of
these puts a second full copy of the model on a GPU.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.generation.engine import Adapter, SharedMemory
from trainer.generation.gpu_ipc import accept, collect, connect, export_buffer, import_buffer
from trainer.parallel.mesh import open_store

Weights = Iterator[tuple[str, Tensor]]
"""Pairs of a Hugging Face name and a full tensor."""
_BUFFERS = 2  # one travels while the other is filled
_ALIGNMENT = 16  # bytes; tensors of any type begin at a multiple of it


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
    """Longest time for one bucket, and for all members to join."""
    bucket_bytes: int
    total_bytes: int = 0
    """About the size of all tensors, for receivers that write them to files."""

    def send(self, weights: Weights, rank: int) -> None:
        """Send every tensor. A collective over the ranks.

        Every `next` of `weights` may be a collective, so all ranks step through it; rank 0 sends.
        """
        if rank == 0:
            _channel(self, True).send(weights)
        else:
            _step_through(weights)

    def receive(self) -> Weights:
        """Yield every tensor of one `send` as it arrives. The tensors are the caller's."""
        return _channel(self, False).receive()


@dataclass(frozen=True)
class Ipc:
    """Weights that each worker copies from a rank on the same GPU. Ranks `send` while workers receive."""

    token: str
    """A secret of the ranks and the workers, which also names their connections."""
    senders: tuple[int, ...]
    """The ranks that share their GPU with a worker that receives."""
    device: str
    """`cuda`. Tests on CPU use shared memory instead."""
    timeout_s: float
    """Longest time for one bucket, and for the other side to connect."""
    bucket_bytes: int

    def send(self, weights: Weights, rank: int) -> None:
        """Hand every tensor to the worker on this rank's GPU, if there is one. A collective over the ranks."""
        if rank not in self.senders:
            _step_through(weights)
            return
        with accept(self.token, self.device, self.timeout_s) as link:
            buffers: list[Tensor] = []
            unread = [0] * _BUFFERS

            def take(slot: int) -> Tensor:
                if slot == len(buffers):
                    buffer, handle = export_buffer(self.bucket_bytes, self.device)
                    buffers.append(buffer)
                    link.send(handle)
                while unread[slot]:
                    unread[link.receive()] -= 1
                return buffers[slot]

            for slot, _, pieces in _fill_buckets(weights, take):
                _finish_kernels(self.device)  # the other process does not see this one's streams
                link.send([slot, pieces])
                unread[slot] += 1
            link.send(None)
            while any(unread):
                unread[link.receive()] -= 1
            released = link.receive()
            assert released is None, released
            buffers.clear()
            collect(self.device)

    def receive(self) -> Weights:
        """Yield every tensor of one `send` as it arrives. The tensors are the caller's."""
        with connect(self.token, self.device, self.timeout_s) as link:
            buffers: list[Tensor] = []
            join = TensorAssembler()
            while (message := link.receive()) is not None:
                if isinstance(message, bytes):
                    buffers.append(import_buffer(message, self.device))
                    continue
                slot, pieces = message
                tensors = list(join(buffers[slot], pieces))
                _finish_kernels(self.device)
                link.send(slot)
                yield from tensors
            buffers.clear()
            collect(self.device)
            link.send(None)  # only now can the sender free them


WeightSource = SharedMemory | Broadcast | Ipc | Adapter


class WeightTransferGroup:
    """One member's end of a broadcast group. Opening it waits for rank 0 only.

    Receivers get their ranks in the group in the order in which they join. The contents of the buckets are written to
    the group's key-value store once, because they are the same in every sync.
    """

    def __init__(self, group: Broadcast, sender: bool):
        timeout = timedelta(seconds=group.timeout_s)
        self._store = open_store(group.address, sender, 1 + group.receivers, group.timeout_s)
        rank = 0 if sender else self._store.add("receivers", 1)
        assert rank <= group.receivers, f"more than {group.receivers} workers receive weights at {group.address}"
        self._device = group.device
        self._bucket_bytes = group.bucket_bytes
        self._headers: list[str] = []
        if group.device == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group = dist.ProcessGroupNCCL(self._store, rank, 1 + group.receivers, options)
        else:
            self._group = dist.ProcessGroupGloo(self._store, rank, 1 + group.receivers, timeout)

    def send(self, weights: Weights) -> None:
        """Send all of `weights` to all receivers."""
        buffers = [torch.empty(self._bucket_bytes, dtype=torch.uint8, device=self._device) for _ in range(_BUFFERS)]
        travelling: dict[int, Any] = {}

        def take(slot: int) -> Tensor:
            if slot in travelling:
                travelling.pop(slot).wait()
            return buffers[slot]

        count = 0
        for slot, used, pieces in _fill_buckets(weights, take):
            self._announce(count, json.dumps([used, pieces]))
            travelling[slot] = self._group.broadcast(buffers[slot][:used], 0)
            count += 1
        self._announce(count, "null")
        for work in travelling.values():
            work.wait()

    def receive(self) -> Weights:
        """Yield the tensors of one `send` as they arrive."""
        join = TensorAssembler()
        begun = self._begin_bucket(0)
        for i in itertools.count(1):
            if begun is None:
                return
            buffer, pieces, work = begun
            begun = self._begin_bucket(i)  # travels while the engine loads the one before
            work.wait()
            yield from join(buffer, pieces)

    def _begin_bucket(self, i: int) -> tuple[Tensor, list, Any] | None:
        header = json.loads(self._header(i))
        if header is None:
            return None
        used, pieces = header
        buffer = torch.empty(used, dtype=torch.uint8, device=self._device)
        return buffer, pieces, self._group.broadcast(buffer, 0)

    def _announce(self, i: int, header: str) -> None:
        if i == len(self._headers):
            self._store.set(f"bucket{i}", header)
            self._headers.append(header)
        assert self._headers[i] == header, f"bucket {i} was {self._headers[i]} and is now {header}"

    def _header(self, i: int) -> str:
        if i == len(self._headers):
            self._headers.append(self._store.get(f"bucket{i}").decode())
        return self._headers[i]


@functools.cache
def _channel(group: Broadcast, sender: bool) -> WeightTransferGroup:
    """Open this process's end at the first sync and keep it. `group` is a new copy in each sync."""
    return WeightTransferGroup(group, sender)


def _fill_buckets(weights: Weights, take: Callable[[int], Tensor]) -> Iterator[tuple[int, int, list]]:
    """Copy tensors one after another into buckets.

    Args:
        take: returns the buffer of a slot, `(bytes,)` uint8, once it can be filled again.

    Yields:
        the slot of the bucket, the bytes that are used of it, and its pieces. A piece is the name, type and shape of a
        tensor, where the piece begins in the tensor and in the bucket, and how long it is, in bytes. The last bucket
        may be shorter.
    """
    slots = itertools.cycle(range(_BUFFERS))
    slot, buffer, used, pieces = next(slots), None, 0, []
    for name, tensor in weights:
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        kind, shape, begin = str(tensor.dtype).removeprefix("torch."), list(tensor.shape), 0
        while True:
            if buffer is None:
                buffer, used, pieces = take(slot), 0, []
            count = min(len(data) - begin, len(buffer) - used)
            buffer[used : used + count].copy_(data[begin : begin + count])
            pieces.append([name, kind, shape, begin, used, count])
            begin += count
            used += count + -count % _ALIGNMENT
            if used >= len(buffer):  # send it before the next tensor is gathered
                yield slot, len(buffer), pieces
                slot, buffer = next(slots), None
            if begin == len(data):
                break
    if buffer is not None:
        yield slot, used, pieces


class TensorAssembler:
    """Puts tensors together from the pieces in buckets."""

    def __init__(self) -> None:
        self._data: Tensor | None = None

    def __call__(self, buffer: Tensor, pieces: list) -> Weights:
        """Yield copies of the tensors whose last piece is in the bucket."""
        for name, kind, shape, begin, start, count in pieces:
            dtype = getattr(torch, kind)
            if begin == 0:
                self._data = torch.empty(shape, dtype=dtype, device=buffer.device)
            assert self._data is not None
            data = self._data.reshape(-1).view(torch.uint8)
            data[begin : begin + count].copy_(buffer[start : start + count])
            if begin + count == len(data):
                tensor, self._data = self._data, None
                yield name, tensor


def _step_through(weights: Weights) -> None:
    for _ in weights:
        pass


def _finish_kernels(device: str) -> None:
    if device == "cuda":
        torch.cuda.current_stream().synchronize()
