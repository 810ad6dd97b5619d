"""Move tensors to host memory while nobody uses them, and say whether a GPU has enough for who wakes up."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, UntypedStorage

from trainer.config import Config
from trainer.workers.host_memory import HostCopy, HostMemory, bytes_of, storages_of

_NEXT_OFFLOAD = {"none": "optimizer", "optimizer": "all"}


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of a GPU, in bytes, as the driver counts it for all processes."""

    free: int
    total: int


def engine_problem(needed: int, growth: int, device: DeviceMemory, cfg: Config) -> str | None:
    """Return why an engine that takes `needed` bytes cannot wake up beside a rank that will take `growth` bytes
    meanwhile, in one sentence; None: it can."""
    shortage = needed + growth - device.free
    if shortage <= 0:
        return None
    taken = f", of which the optimizer will take {_gb(growth)}" if growth else ""
    share, offload = cfg.rollout.gpu_memory_utilization, _NEXT_OFFLOAD.get(cfg.trainer.offload)
    lower = math.floor(100 * (share - shortage / device.total)) / 100
    remedies = [f"lower rollout.gpu_memory_utilization={share:g} to {lower:g} (vLLM)"] if lower > 0 else []
    remedies += [f"set trainer.offload={offload}"] if offload else []
    remedies += ["use more GPUs"]
    return (
        f"rollout.colocate=true: an engine needs {_gb(needed)} of a GPU to wake up, but of {_gb(device.total)} only "
        f"{_gb(device.free)} are free beside the rank{taken}; {', or '.join(remedies)}"
    )


def rank_problem(needed: int, free: int, cfg: Config) -> str | None:
    """Return why a rank cannot take back `needed` bytes of which `free` are free, in one sentence; None: it can."""
    if needed <= free:
        return None
    return (
        f"trainer.offload={cfg.trainer.offload}: a rank needs {_gb(needed)} of its GPU for what it has moved to host "
        f"memory, but only {_gb(free)} are free; end other programs on this GPU, or use more GPUs"
    )


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"


class OffloadBuffer:
    """Holds the contents of a role's tensors whose memory on the device is freed meanwhile.

    Only the memory goes: tensors, storages and everything that refers to them stay the same objects, so that FSDP and
    the optimizer notice nothing. A copy that a save has made of the tensors as they are now serves as the contents. The
    tensors may change only after `memory.forget`.
    """

    def __init__(self, memory: HostMemory):
        self.memory = memory
        self._offloaded: dict[int, UntypedStorage] = {}
        self._optimizer: set[int] = set()
        self._copy: HostCopy | None = None

    def offloaded_bytes(self, optimizer: bool = True) -> int:
        return sum(self._copied(number).numel() for number in self._chosen(optimizer))

    @torch.no_grad()
    def offload(self, weights: Iterable[Tensor], optimizer: Iterable[Tensor] = ()) -> None:
        """Copy tensors to host memory (of DTensors, the local shards), and free their memory on the device. Those that
        an earlier call has offloaded may be among them."""
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
        """Give offloaded tensors, or those but the optimizer's, their contents back."""
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
