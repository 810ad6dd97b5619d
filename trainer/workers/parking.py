"""Move tensors to host memory while nobody uses them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class ParkingPlace:
    """Holds the contents of tensors whose memory on the device is freed meanwhile.

    Only the memory goes: tensors, storages and everything that refers to them stay the same objects, so that FSDP, the
    optimizer and a checkpoint's stager notice nothing. The host memory is kept for the next time.
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}
        self._parked: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}

    @property
    def parked_bytes(self) -> int:
        """Bytes that `restore` will take on the device."""
        return sum(host.numel() for _, host in self._parked.values())

    @torch.no_grad()
    def park(self, tensors: Iterable[Tensor]) -> None:
        """Copy `tensors` to host memory (of DTensors, the local shards), and free their memory on the device."""
        copies: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}
        for tensor in tensors:
            storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
            number = storage._cdata
            if storage.nbytes() == 0 or number in copies:
                continue
            host = self._kept[number][1] if number in self._kept else None
            if host is None or host.numel() != storage.nbytes():
                host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
            copies[number] = storage, host.copy_(_bytes_of(storage), non_blocking=True)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        for storage, _ in copies.values():
            storage.resize_(0)
        self._kept.update(copies)
        self._parked.update(copies)

    @torch.no_grad()
    def restore(self) -> None:
        """Give all parked tensors their contents back."""
        for storage, host in self._parked.values():
            storage.resize_(host.numel())
            _bytes_of(storage).copy_(host, non_blocking=True)
        self._parked.clear()


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
