"""Whether a GPU that a rank and an engine share has enough memory for the one that wakes up.

CUDA itself would say "out of memory" in the middle of waking, and leave an engine that is half awake.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainer.config import Config

_NEXT_OFFLOAD = {"none": "optimizer", "optimizer": "all"}


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of a GPU, in bytes, as the driver counts it for all processes."""

    free: int
    total: int


def engine_problem(needed: int, growth: int, device: DeviceMemory, cfg: Config) -> str | None:
    """Return why an engine cannot wake up beside a rank, in one sentence; None: it can.

    Args:
        needed: bytes that the engine will take.
        growth: bytes that the rank has yet to take, and will hold while engines are awake.
    """
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
    """Return why a rank cannot take back what it has moved to host memory, in one sentence; None: it can.

    Args:
        needed: bytes in host memory.
        free: bytes that the rank can take.
    """
    if needed <= free:
        return None
    return (
        f"trainer.offload={cfg.trainer.offload}: a rank needs {_gb(needed)} of its GPU for what it has moved to host "
        f"memory, but only {_gb(free)} are free; end other programs on this GPU, or use more GPUs"
    )


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
