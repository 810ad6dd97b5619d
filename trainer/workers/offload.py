"""Move tensors to host memory while nobody uses them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, UntypedStorage

from trainer.workers.host_memory import HostCopy, HostMemory, bytes_of, storages_of


class OffloadBuffer:
    """Holds the contents of a role's tensors whose memory on the device is freed meanwhile.

    Only the memory goes: tensors, storages and everything that refers to them stay the same objects, so that FSDP and
    the optimizer notice nothing. A copy that a save has made of the tensors as they are now serves as the contents.

    Args:
        memory: of the role. The tensors may change only after `memory.forget`.
    """

    def __init__(self, memory: HostMemory):
        self.memory = memory
        self._offloaded: dict[int, UntypedStorage] = {}
        self._optimizer: set[int] = set()
        self._copy: HostCopy | None = None

    def offloaded_bytes(self, optimizer: bool = True) -> int:
        """Return the bytes that `onload` will take on the device."""
        return sum(self._copied(number).numel() for number in self._chosen(optimizer))

    @torch.no_grad()
    def offload(self, weights: Iterable[Tensor], optimizer: Iterable[Tensor] = ()) -> None:
        """Copy tensors to host memory (of DTensors, the local shards), and free their memory on the device.

        Those that an earlier call has offloaded may be among them.
        """
        states = storages_of(list(optimizer))
        here = {number: s for number, s in (storages_of(list(weights)) | states).items() if s.nbytes()}
        if not here:
            return
        copy = self.memory.current
        if copy is None or not copy.covers(here):
            assert not self._offloaded, "tensors that are offloaded cannot be copied again"
            copy = self.memory.copy(here)
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
        if self._copy is None:
            self._copy = self.memory.hold(copy)
        assert self._copy is copy, "tensors have changed while others of the role were offloaded"
        for storage in here.values():
            storage.resize_(0)
        self._offloaded |= here
        self._optimizer |= states.keys()

    @torch.no_grad()
    def onload(self, optimizer: bool = True) -> None:
        """Give offloaded tensors their contents back.

        Args:
            optimizer: also those of the optimizer.
        """
        for number in self._chosen(optimizer):
            storage, host = self._offloaded[number], self._copied(number)
            storage.resize_(host.numel())  # if the memory has run out, the tensor stays offloaded
            bytes_of(storage).copy_(host, non_blocking=True)
            del self._offloaded[number]
        if self._copy is not None and not self._offloaded:
            self.memory.release(self._copy)
            self._copy, self._optimizer = None, set()

    def _chosen(self, optimizer: bool) -> list[int]:
        return [number for number in self._offloaded if optimizer or number not in self._optimizer]

    def _copied(self, number: int) -> Tensor:
        assert self._copy is not None
        return self._copy.part(number)
