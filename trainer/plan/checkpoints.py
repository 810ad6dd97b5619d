"""The sizes of checkpoints and exports, and the cadence of saves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.config import Config
from trainer.plan.hardware import START_S
from trainer.plan.ranks import PlannedRole


@dataclass(frozen=True)
class PlannedSaves:
    """What checkpoints take, and what a kill costs."""

    checkpoint: int
    """Bytes of a checkpoint."""
    export: int
    """Bytes of an export in Hugging Face format."""
    write_s: float
    """Seconds in which a copied state is written. Training continues meanwhile, unless `trainer.ckpt_async` is false."""
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
    cfg: Config,
    roles: Sequence[PlannedRole],
    step_s: float,
    rollout_s: float,
    copy_s: float,
    storage: float,
    on_cpu: bool,
) -> PlannedSaves:
    """Return what saves take, and what a kill costs.

    Args:
        step_s: seconds of a step.
        rollout_s: those of them in which episodes are made, which the journal keeps.
        copy_s: seconds in which a rank copies its state to host memory.
        storage: bytes per second of the storage, of all nodes together.
    """
    t = cfg.trainer
    size = checkpoint_bytes(roles)
    write = size / storage
    # The copy runs beside the rollouts of the next step.
    blocked = max(0.0, copy_s - rollout_s) if t.ckpt_async else copy_s + write
    best_s = max(math.sqrt(2 * blocked * t.mean_time_between_failures * 60), 2 * write, step_s)
    best = max(1, round(best_s / step_s))
    interval = t.ckpt_interval if isinstance(t.ckpt_interval, int) and t.ckpt_interval > 0 else best
    if t.ckpt_interval == -1:
        minutes = t.ckpt_interval_minutes
        interval = max(1, round(60 * minutes / step_s)) if minutes > 0 else cfg.total_steps
    kept = rollout_s if cfg.rollout.journal and cfg.task.generates else 0.0
    lost = interval / 2 * (step_s - kept) + min(kept, step_s) / 2
    restart = START_S["cpu" if on_cpu else "cuda"] + size / storage
    return PlannedSaves(size, export_bytes(cfg, roles, on_cpu), write, blocked, interval, best, restart, lost)
