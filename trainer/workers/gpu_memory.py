"""Say whether a GPU has enough memory for who wakes up on it."""

from __future__ import annotations

import math

from trainer.config import Config

_NEXT_OFFLOAD = {"none": "optimizer", "optimizer": "all"}


def engine_problem(needed: int, growth: int, free: int, total: int, cfg: Config) -> str | None:
    """Return why an engine that takes `needed` bytes cannot wake up beside a rank that will take `growth` bytes
    meanwhile, in one sentence; None: it can. `free` and `total` are bytes of the GPU, as the driver counts them for all
    processes."""
    shortage = needed + growth - free
    if shortage <= 0:
        return None
    taken = f", of which the optimizer will take {_gb(growth)}" if growth else ""
    share, offload = cfg.rollout.gpu_memory_utilization, _NEXT_OFFLOAD.get(cfg.trainer.offload)
    lower = math.floor(100 * (share - shortage / total)) / 100
    remedies = [f"lower rollout.gpu_memory_utilization={share:g} to {lower:g} (vLLM)"] if lower > 0 else []
    remedies += [f"set trainer.offload={offload}"] if offload else []
    remedies += ["use more GPUs"]
    return (
        f"rollout.colocate=true: an engine needs {_gb(needed)} of a GPU to wake up, but of {_gb(total)} only "
        f"{_gb(free)} are free beside the rank{taken}; {', or '.join(remedies)}"
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
