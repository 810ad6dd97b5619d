"""The sizes of checkpoints and exports, and the cadence of saves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.config import Config
from trainer.plan.hardware import START_S
from trainer.plan.ranks import PlannedRole
from trainer.plan.timing import StepTime


@dataclass(frozen=True)
class PlannedSaves:
    """What checkpoints take, and what a kill costs."""

    checkpoint: int
    """Bytes of a checkpoint."""
    export: int
    """Bytes of an export in Hugging Face format."""
    write_s: float
    """Seconds in which a copied state is written. With `trainer.ckpt_async`, training continues meanwhile."""
    blocked_s: float
    """Seconds that training waits for a save."""
    interval_steps: int
    """Steps between saves."""
    best_interval_steps: int
    """Steps between saves that cost least, by `trainer.mean_time_between_failures`."""
    restart_s: float
    """Seconds from a kill to the first step after it."""
    lost_s: float
    """Seconds of work that a kill repeats, on average."""

    @property
    def kill_s(self) -> float:
        return self.restart_s + self.lost_s


def checkpoint_bytes(roles: Sequence[PlannedRole]) -> int:
    """Return the bytes of a checkpoint: saved weights and, of trained roles, two moments of each number."""
    total = 0
    for role in roles:
        if role.spec.saved:
            saved = role.model.trained if role.spec.has_adapters else role.model.total
            total += (12 * role.model.trained) if role.spec.trained else role.itemsize * saved
    return total


def export_bytes(cfg: Config, roles: Sequence[PlannedRole], on_cpu: bool) -> int:
    """Return the bytes of an export of the policy."""
    policy = roles[0]
    of_adapter = policy.spec.has_adapters and cfg.trainer.hf_save_lora == "adapter"
    itemsize = 4 if cfg.export_dtype == "float32" or cfg.export_dtype == "auto" and on_cpu else 2
    return itemsize * (policy.model.trained if of_adapter else policy.model.total)


def plan_saves(
    cfg: Config, roles: Sequence[PlannedRole], time: StepTime, copy_s: float, storage: float, on_cpu: bool
) -> PlannedSaves:
    """Return what saves take, and what a kill costs.

    A kill repeats the steps since the last save, half an interval on average. The journal keeps their episodes, so
    what the ranks do counts alone, and half of the rollouts of the step that was interrupted.

    Args:
        time: of a step.
        copy_s: seconds in which a rank copies its state to host memory.
        storage: bytes per second of the storage, of all nodes together.
    """
    t, step_s = cfg.trainer, time.total
    size = checkpoint_bytes(roles)
    write = size / storage
    # The copy runs while the ranks wait for the rollouts of the next step.
    idle = max(0.0, time.rollout - time.rest) if time.overlaps else time.rollout
    blocked = max(0.0, copy_s - idle) if t.ckpt_async else copy_s + write
    best_s = max(math.sqrt(2 * blocked * t.mean_time_between_failures * 60), 2 * write, step_s)
    best = max(1, round(best_s / step_s))
    interval = t.ckpt_interval if isinstance(t.ckpt_interval, int) and t.ckpt_interval > 0 else best
    if t.ckpt_interval == -1:
        minutes = t.ckpt_interval_minutes
        interval = max(1, round(60 * minutes / step_s)) if minutes > 0 else cfg.total_steps
    if cfg.rollout.journal and cfg.task.generates:
        lost = interval / 2 * time.rest + time.rollout / 2
    else:
        lost = interval / 2 * step_s
    restart = START_S["cpu" if on_cpu else "cuda"] + size / storage
    return PlannedSaves(size, export_bytes(cfg, roles, on_cpu), write, blocked, interval, best, restart, lost)
