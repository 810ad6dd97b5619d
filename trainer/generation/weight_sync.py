"""How the policy's weights reach the engines.

- Shared memory: the ranks write safetensors to `/dev/shm`, each its own shards, and engines read them tensor by tensor.
- Delta: each rank serves what has changed of its shards, and engines fetch it (`trainer.generation.weight_shards`).
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
import glob
import hashlib
import itertools
import json
import os
import pickle
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Client, answer_challenge, deliver_challenge
from multiprocessing.connection import Connection as Pipe
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.multiprocessing.reductions import reduce_tensor

from trainer.errors import one_line
from trainer.files.shared_memory import check_owner
from trainer.generation.engine import Adapter, SharedMemory
from trainer.generation.weight_shards import Shards
from trainer.models.weight_deltas import WeightsDigest
from trainer.parallel.mesh import open_store
from trainer.process import time_limits

Weights = Iterator[tuple[str, Tensor]]  # pairs of a Hugging Face name and a full tensor
_BUFFERS = 2  # one travels while the other is filled
_ALIGNMENT = 16  # bytes; tensors of any type begin at a multiple of it
_DEVICE_ARGUMENT = 6  # of torch's `rebuild_cuda_tensor`
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}


@dataclass(frozen=True)
class Broadcast:
    """Weights sent by rank 0. Ranks get this object to `send`, engines to receive, at the same time."""

    address: str  # address of the group's store, which rank 0 hosts (see `trainer.parallel.mesh.open_store`)
    receivers: int  # Number of workers of all engines. Each is a member of the group.
    device: str  # device of the tensors: `cuda` or `cpu`
    timeout_s: float  # longest time for one bucket, and for all members to join
    bucket_bytes: int
    total_bytes: int = 0  # about the size of all tensors, for receivers that write them to files

    def send(self, weights: Weights, rank: int) -> str | None:
        """Send every tensor. A collective over the ranks.

        Every `next` of `weights` may be a collective, so all ranks step through it; rank 0 sends.

        Returns:
            the digest of what rank 0 has sent (see `WeightsDigest`); None on other ranks.
        """
        if rank == 0:
            digest = WeightsDigest()
            _channel(self, True).send(digest.of((name, tensor.to(self.device)) for name, tensor in weights))
            return str(digest)
        deque(weights, maxlen=0)
        return None

    def receive(self) -> Weights:
        """Yield every tensor of one `send` as it arrives. The tensors are the caller's."""
        return _channel(self, False).receive()


@dataclass(frozen=True)
class Ipc:
    """Weights that each worker copies from a rank on the same GPU. Ranks `send` while workers receive."""

    token: str  # a secret of the ranks and the workers, which also names their connections
    senders: tuple[int, ...]  # the ranks that share their GPU with a worker that receives
    device: str  # `cuda`. Tests on CPU use shared memory instead.
    timeout_s: float  # longest time for one bucket, and for the other side to connect
    bucket_bytes: int

    def send(self, weights: Weights, rank: int) -> str | None:
        """Hand every tensor to the worker on this rank's GPU, if there is one. A collective over the ranks.

        Returns:
            the digest of what this rank has sent (see `WeightsDigest`); None: it has sent nothing.
        """
        if rank not in self.senders:
            deque(weights, maxlen=0)
            return None
        digest = WeightsDigest()
        with accept(self.token, self.device, self.timeout_s) as link:
            buffers: list[Tensor] = []
            unread = [0] * _BUFFERS

            def take(slot: int) -> Tensor:
                if slot == len(buffers):
                    buffer, handle = export_buffer(self.bucket_bytes, self.device)
                    buffers.append(buffer)
                    link.send(handle)
                while unread[slot]:
                    unread[receive_within(link, self.timeout_s)] -= 1
                return buffers[slot]

            for slot, _, pieces in _fill_buckets(digest.of(weights), take):
                _finish_kernels(self.device)  # the other process does not see this one's streams
                link.send([slot, pieces])
                unread[slot] += 1
            link.send(None)
            while any(unread):
                unread[receive_within(link, self.timeout_s)] -= 1
            released = receive_within(link, self.timeout_s)
            assert released is None, released
            buffers.clear()
            collect(self.device)
        return str(digest)

    def receive(self) -> Weights:
        """Yield every tensor of one `send` as it arrives. The tensors are the caller's."""
        with connect(self.token, self.device, self.timeout_s) as link:
            buffers: list[Tensor] = []
            join = TensorAssembler()
            while (message := receive_within(link, self.timeout_s)) is not None:
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


WeightSource = SharedMemory | Shards | Broadcast | Ipc | Adapter


def read_weights(directory: str) -> Weights:
    """Yield the tensors of the safetensors files in `directory`."""
    check_owner(directory)
    for path in sorted(glob.glob(os.path.join(directory, "*.safetensors"))):
        with safe_open(path, framework="pt") as file:
            for name in file.offset_keys():
                yield name, file.get_tensor(name)


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
        if i == len(self._headers):
            self._headers.append(self._store.get(f"bucket{i}").decode())
        header = json.loads(self._headers[i])
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


_channel = functools.cache(WeightTransferGroup)
"""This process's end of a group, opened at its first sync and kept. A group is a new copy in each sync."""


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


def _finish_kernels(device: str) -> None:
    if device == "cuda":
        torch.cuda.current_stream().synchronize()


def receive_within(pipe: Pipe, timeout_s: float) -> Any:
    """Return the next message.

    Raises:
        TimeoutError: none came in time.
        EOFError: the other process has ended.
    """
    if not pipe.poll(timeout_s):
        raise TimeoutError(f"no answer for {timeout_s:g} s while weights went between two processes on a GPU")
    return pipe.recv()


@contextmanager
def accept(token: str, device: str, timeout_s: float) -> Iterator[Pipe]:
    """Wait for the other process on this process's GPU, which calls `connect`."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(_address(token, device))
        server.listen()
        server.settimeout(timeout_s)
        try:
            end, _ = server.accept()
        except TimeoutError:
            raise TimeoutError(f"no engine took weights on this GPU for {timeout_s:g} s") from None
    end.setblocking(True)
    with Pipe(end.detach()) as pipe:
        deliver_challenge(pipe, token.encode())
        answer_challenge(pipe, token.encode())
        yield pipe


@contextmanager
def connect(token: str, device: str, timeout_s: float) -> Iterator[Pipe]:
    """Connect to the other process on this process's GPU, which calls `accept` at about the same time."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            pipe = Client(_address(token, device), "AF_UNIX", authkey=token.encode())
            break
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no rank offers weights on this GPU for {timeout_s:g} s") from None
            time.sleep(time_limits.IPC_RETRY_S)
    with pipe:
        yield pipe


def export_buffer(size: int, device: str) -> tuple[Tensor, bytes]:
    """Return a new buffer `(size,)` of uint8, and the handle with which another process on the GPU can import it."""
    if device == "cpu":
        buffer = torch.empty(size, dtype=torch.uint8).share_memory_()
    else:
        settings = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
        expandable, fixed = "expandable_segments:True", "expandable_segments:False"
        settings = settings.replace(" ", "")
        # In memory of its own: other processes open expandable segments slowly, if they may at all.
        set_allocator = torch._C._accelerator_setAllocatorSettings  # torch has no public function for it
        try:
            if expandable in settings:
                set_allocator(settings.replace(expandable, fixed))
            buffer = torch.empty(size, dtype=torch.uint8, device="cuda")
        finally:
            if expandable in settings:
                set_allocator(settings)
    return buffer, bytes(ForkingPickler.dumps(reduce_tensor(buffer)))


def import_buffer(handle: bytes, device: str) -> Tensor:
    """Return the buffer that the other process has exported."""
    rebuild, arguments = pickle.loads(handle)
    if device == "cuda":  # the same GPU may have another number here
        arguments = list(arguments)
        arguments[_DEVICE_ARGUMENT] = torch.cuda.current_device()
    return rebuild(*arguments)


def collect(device: str) -> None:
    """Free the memory of buffers that no process uses any more.

    torch keeps a buffer that it has exported until the other process has let it go, and does not look by itself.
    """
    if device == "cuda":
        torch.cuda.ipc_collect()


def _address(token: str, device: str) -> str:
    """Return the address of the connection on this process's GPU, in Linux' abstract namespace: it leaves no file."""
    gpu = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid) if device == "cuda" else device
    return "\0trainer-" + hashlib.sha256(f"{token} {gpu}".encode()).hexdigest()


class Expected(NamedTuple):
    """What a tensor in the files of a model must be."""

    identity: int  # tied tensors have one
    shape: tuple[int, ...]
    dtype: torch.dtype


def weights_of(model: nn.Module, dtype: torch.dtype) -> dict[str, Expected]:
    """Return the tensors in the files of a Hugging Face model that computes in `dtype`, by name."""
    from trainer.models.weight_names import file_tensors, file_units  # late: it imports the model classes

    weights, found = model.state_dict(keep_vars=True), {}
    for unit in file_units(model, weights):
        for number, (name, tensor) in enumerate(file_tensors([unit], weights, dtype).items()):
            identity = hash((number, *(id(weights[one]) for one in unit.names)))
            found[name] = Expected(identity, tuple(tensor.shape), tensor.dtype)
    return found


def refused_weights(directory: str, expected: Mapping[str, Expected]) -> str | None:
    """Return why the safetensors files in `directory` are no weights for the model; None: they are.

    Args:
        expected: `weights_of` the model.
    """
    offered: set[str] = set()
    for path in sorted(glob.glob(os.path.join(directory, "*.safetensors"))):
        try:
            opened = safe_open(path, framework="pt")
        except (OSError, SafetensorError) as error:
            return f"cannot read the weights of this job ({os.path.basename(path)}: {one_line(str(error))})"
        with opened as file:
            for name in file.keys():  # noqa: SIM118 - it has no iterator
                piece = file.get_slice(name)
                if name in offered:
                    return f"gets {name} twice from this job"
                if name not in expected:
                    return f"serves another model: it has no weight {name}"
                shape, own = tuple(piece.get_shape()), expected[name].shape
                if shape != own:
                    return (
                        f"serves another model: {name} has the shape {list(own)} there, and {list(shape)} in this job"
                    )
                kind = _DTYPES.get(piece.get_dtype())
                if kind is not None and kind != expected[name].dtype:
                    names = [str(one).removeprefix("torch.") for one in (expected[name].dtype, kind)]
                    return f"computes in {names[0]} and gets weights in {names[1]}; set rollout.dtype of both to one"
                offered.add(name)
    covered = {expected[name].identity for name in offered}
    missing = sorted(name for name, one in expected.items() if one.identity not in covered)
    return f"serves another model: this job has no weight {missing[0]}" if missing else None
