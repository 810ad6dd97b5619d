"""Copies of a role's tensors in host memory: for saves, and while engines use the memory of the GPU."""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import mmap
import threading
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor

from trainer.errors import format_size
from trainer.process.machine_limits import available_bytes

LOG = logging.getLogger(__name__)

Storages = Mapping[int, UntypedStorage]
"""The memory of tensors on their device, by its number (see `storages_of`)."""

_ALIGNMENT = 64


def buffer_bytes(sizes: Iterable[int]) -> int:
    return sum(_aligned(size) for size in sizes)


def local_tensor(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def storages_of(value: Any) -> dict[int, UntypedStorage]:
    """Return the memory of all tensors in a nested value; of DTensors, that of the local shards. Views share one."""
    if isinstance(value, Tensor):
        storage = local_tensor(value).untyped_storage()
        return {storage._cdata: storage}
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return {}
    return {number: storage for part in value for number, storage in storages_of(part).items()}


class HostBuffer:
    """Flat host memory. It is pinned for the GPU with this number, if any, so that copies run beside kernels, and at
    full speed.

    The pages belong to this buffer alone: CUDA refuses to pin a page twice, and torch's own allocator of pinned memory
    would round the size up to a power of two. Raises OSError: the machine does not have so much memory."""

    def __init__(self, size: int, gpu: int | None):
        free = available_bytes()
        if free is not None and size > free:
            needed = f"{format_size(size)} of host memory are needed for copies of a rank's state"
            raise OSError(f"{needed}, and {format_size(free)} are available")
        self.size = size
        self.users = 0
        self._memory = mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            self._memory.madvise(mmap.MADV_HUGEPAGE)  # pinning takes its time by page
        if gpu is None:
            return
        address = self.part(0, 1).data_ptr()
        with torch.cuda.device(gpu):
            result = int(torch.cuda.cudart().cudaHostRegister(address, len(self._memory), 1))  # portable
            if result != 0:
                LOG.warning(
                    "CUDA does not pin %s of host memory (error %d): copies of a rank's state are slower, and training "
                    "waits for them",
                    format_size(self.size),
                    result,
                )
                with contextlib.suppress(RuntimeError):  # else the next kernel would report the error
                    torch.zeros(1, device="cuda")
                return
        # `self` lives as long as its memory is used for copies, and ends before the memory.
        weakref.finalize(self, _unpin, address, gpu).atexit = False

    def part(self, start: int, size: int) -> Tensor:
        return torch.frombuffer(self._memory, dtype=torch.uint8, offset=start, count=size)


def _unpin(address: int, gpu: int) -> None:
    with torch.cuda.device(gpu):
        torch.cuda.synchronize()  # a copy from it may still run
        torch.cuda.cudart().cudaHostUnregister(address)


class HostCopy:
    def __init__(self, buffer: HostBuffer, storages: Storages):
        self.buffer = buffer
        self.storages = dict(storages)  # kept alive, so that no other gets their numbers
        self.parts: dict[int, Tensor] = {}  # bytes, by the number of the storage; not of empty ones
        start = 0
        for number, storage in storages.items():
            size = storage.nbytes()
            if size:
                self.parts[number] = buffer.part(start, size).copy_(bytes_of(storage), non_blocking=True)
            start += _aligned(size)

    @torch.no_grad()
    def with_more(self, storages: Storages) -> HostCopy:
        """Return the same with copies of those of the tensors that it lacks, which are few, in memory of their own."""
        more = {number: storage for number, storage in storages.items() if number not in self.storages}
        new = copy.copy(self)
        new.storages = self.storages | more
        new.parts = dict(self.parts)
        for number, storage in more.items():
            if storage.nbytes():
                new.parts[number] = torch.empty(storage.nbytes(), dtype=torch.uint8).copy_(bytes_of(storage))
        return new

    @torch.no_grad()
    def state(self, value: Any) -> Any:
        """Return the same nested value with the copies of its tensors. DTensors keep their layout."""
        if isinstance(value, DTensor):
            return DTensor(self._view(value.to_local()), value._spec, requires_grad=False)
        if isinstance(value, Tensor):
            return self._view(value)
        if isinstance(value, Mapping):
            return {name: self.state(part) for name, part in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(self.state(part) for part in value)
        return value

    def _view(self, tensor: Tensor) -> Tensor:
        part = self.parts.get(tensor.untyped_storage()._cdata)
        view = torch.empty(0, dtype=tensor.dtype)
        if part is None:
            assert not tensor.numel(), "a tensor has no copy"
            return view.new_empty(tensor.shape)
        return view.set_(part.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


class HostMemory:
    """The host memory for copies of one role's tensors: for saves, and while their memory on the device is freed.

    A copy stays in its buffer while somebody uses it: a save that writes it, or offloaded tensors. It is the `current`
    one until the tensors change (`forget`), and then serves both. So there is one buffer, and a second only if a save
    is still being written when the changed tensors must leave the GPU, or are saved again.

    Of offloaded tensors only the memory goes: tensors, storages and everything that refers to them stay the same
    objects, so that FSDP and the optimizer notice nothing.
    """

    def __init__(self, gpu: int | None):
        self.current: HostCopy | None = None  # a copy of the tensors as they are now, if there is one
        self._gpu = gpu
        self._buffers: list[HostBuffer] = []
        self._last_size = math.inf
        self._lock = threading.Lock()
        self._offloaded: dict[int, UntypedStorage] = {}
        self._of_optimizer: set[int] = set()
        self._contents: HostCopy | None = None  # of what is offloaded

    @property
    def size(self) -> int:
        return sum(buffer.size for buffer in self._buffers)

    @torch.no_grad()
    def copy(self, storages: Storages) -> HostCopy:
        """Begin to copy tensors on the current stream, as the `current` copy. The caller waits for the stream."""
        self.forget()
        with self._lock:
            buffer = self._find(buffer_bytes(storage.nbytes() for storage in storages.values()))
            buffer.users += 1
        try:
            self.current = HostCopy(buffer, storages)
        except BaseException:
            buffer.users -= 1
            raise
        return self.current

    def hold_freed(self, storages: Storages) -> HostCopy | None:
        """Hold the current copy if the memory of some of these tensors on the device is freed; return it."""
        if self.current is None:
            return None
        has_freed = any(number in self.current.parts and not storage.nbytes() for number, storage in storages.items())
        return self.hold(self.current) if has_freed else None

    def forget(self) -> None:
        """Note that the tensors change: no copy is current."""
        if self.current is not None:
            self.release(self.current)
            self.current = None

    def hold(self, copy: HostCopy) -> HostCopy:
        with self._lock:
            copy.buffer.users += 1
        return copy

    def release(self, copy: HostCopy) -> None:
        with self._lock:
            copy.buffer.users -= 1

    def offloaded_bytes(self, optimizer: bool = True) -> int:
        """Return the bytes of what is offloaded; without `optimizer` of all but its states."""
        return sum(self._contents_of(number).numel() for number in self._chosen(optimizer))

    @torch.no_grad()
    def offload(self, weights: Iterable[Tensor], optimizer: Iterable[Tensor] = ()) -> None:
        """Copy tensors to host memory (of DTensors, the local shards), and free their memory on the device. Those that
        an earlier call has offloaded may be among them."""
        states = storages_of(list(optimizer))
        here = {number: s for number, s in (storages_of(list(weights)) | states).items() if s.nbytes()}
        if not here:
            return
        copy = self.current
        if copy is None or not copy.storages.keys() >= here.keys():
            assert not self._offloaded, "tensors that are offloaded cannot be copied again"
            copy = self.copy(here)
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
        if self._contents is None:
            self._contents = self.hold(copy)
        assert self._contents is copy, "tensors have changed while others of the role were offloaded"
        for storage in here.values():
            storage.resize_(0)
        self._offloaded |= here
        self._of_optimizer |= states.keys()

    @torch.no_grad()
    def onload(self, optimizer: bool = True) -> None:
        """Give offloaded tensors, or those but the optimizer's, their contents back."""
        for number in self._chosen(optimizer):
            storage, host = self._offloaded[number], self._contents_of(number)
            storage.resize_(host.numel())  # if the memory has run out, the tensor stays offloaded
            bytes_of(storage).copy_(host, non_blocking=True)
            del self._offloaded[number]
        if self._contents is not None and not self._offloaded:
            self.release(self._contents)
            self._contents, self._of_optimizer = None, set()

    def _chosen(self, optimizer: bool) -> list[int]:
        return [number for number in self._offloaded if optimizer or number not in self._of_optimizer]

    def _contents_of(self, number: int) -> Tensor:
        assert self._contents is not None
        return self._contents.parts[number]

    def _find(self, size: int) -> HostBuffer:
        # Saves and offloading take turns, with two sizes. Unused buffers that are too small for both are of no use.
        least, self._last_size = min(size, self._last_size), size
        if not any(buffer.size >= size for buffer in self._buffers if not buffer.users):
            least = math.inf  # the memory of all unused ones goes before more is taken
        self._buffers = [buffer for buffer in self._buffers if buffer.users or buffer.size >= least]
        fitting = [buffer for buffer in self._buffers if not buffer.users and buffer.size >= size]
        if not fitting:
            fitting = [HostBuffer(size, self._gpu)]
            self._buffers += fitting
        return min(fitting, key=lambda buffer: buffer.size)


def bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
