"""The sizes of checkpoints and exports, and the cadence of saves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.config import Config
from trainer.plan.hardware import START_S
from trainer.plan.ranks import PlannedRole
from trainer.plan.timing import StepTime

_MOMENTS = 100
"""Moments of a kill, spread evenly over the time between two saves."""


@dataclass(frozen=True)
class PlannedSaves:
    """What checkpoints take, and what a kill costs."""

    checkpoint: int
    """Bytes of a checkpoint."""
    export: int
    """Bytes of an export in Hugging Face format."""
    write_s: float
    """Seconds in which a copied state is written. With `trainer.ckpt_async`, training continues meanwhile."""
    save_s: float
    """Seconds from the beginning of a save to its commit: its state is copied, then written."""
    blocked_s: float
    """Seconds that training waits at each save: for its copy, and until the save before has ended. Without
    `trainer.ckpt_async`, until it is committed."""
    waits_s: float
    """Seconds that training waits for all saves of the run. The last save ends the run, so all of it counts."""
    exports_s: float
    """Seconds that training waits while the exports of `trainer.hf_save_interval` are written."""
    interval_steps: int
    """Steps between saves."""
    best_interval_steps: int
    """Steps between saves that cost least, by `trainer.mean_time_between_failures`."""
    restart_s: float
    """Seconds from a kill to the first step after it."""
    lost_s: float
    """Seconds from a restart until the run is where the kill met it, on average: repeated steps, waits for saves."""

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

    A save first waits until the save before has ended. The state is copied and written while training continues, or
    while it waits (`trainer.ckpt_async=false`). The last save of the run is always waited for.

    A kill repeats the steps since the last committed save began, see `_lost_seconds`. The journal keeps their
    episodes, so what the ranks do counts alone, and half of the rollouts of the step that was interrupted.

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
    save = copy_s + write
    stall = max(0.0, copy_s - idle) if t.ckpt_async else save
    best_s = max(math.sqrt(2 * stall * t.mean_time_between_failures * 60), 2 * save, step_s)
    best = max(1, round(best_s / step_s))
    interval = _interval(cfg, step_s, best)
    if interval >= time.steps:  # the last save is the only one, and nothing is left to train meanwhile
        stall = save
    blocked = stall + _left_of_save(save, interval * step_s + stall)
    waits = _all_waits(time, interval, stall, save)
    work = min(interval, time.steps) * step_s
    if cfg.rollout.journal and cfg.task.generates:
        interrupted = work / (work + blocked)  # a kill while training waits for a save interrupts no step
        lost = _lost_seconds(work, stall, save, time.rest / step_s) + interrupted * time.rollout / 2
    else:
        lost = _lost_seconds(work, stall, save, 1.0)
    restart = START_S["cpu" if on_cpu else "cuda"] + size / storage
    export = export_bytes(cfg, roles, on_cpu)
    exports = export / storage * _exports(cfg.trainer.hf_save_interval, time.steps)
    return PlannedSaves(size, export, write, save, blocked, waits, exports, interval, best, restart, lost)


def _interval(cfg: Config, step_s: float, best: int) -> int:
    """Return the steps between saves, on average.

    Args:
        best: the number for `trainer.ckpt_interval=auto`.
    """
    by_steps, minutes = cfg.trainer.ckpt_interval, cfg.trainer.ckpt_interval_minutes
    if isinstance(by_steps, str):
        return best
    if minutes <= 0:
        return by_steps if by_steps > 0 else cfg.total_steps
    by_time = max(1, round(60 * minutes / step_s))
    # Between two saves that are due by steps, others are due by time.
    return round(by_steps / math.ceil(by_steps / by_time)) if by_steps > 0 else by_time


def _exports(interval: int, steps: int) -> int:
    """Return how many exports a run of `steps` steps writes. It also exports its last step, if it exports any."""
    return math.ceil(steps / interval) if interval > 0 else 0


def _left_of_save(save_s: float, since_s: float) -> float:
    """Return the seconds that a save still takes, `since_s` seconds after its beginning."""
    return max(0.0, save_s - since_s)


def _lost_seconds(work_s: float, stall_s: float, save_s: float, repeated: float) -> float:
    """Return the seconds from a restart until the run is where the kill met it, on average over all moments.

    A save counts from its commit on, `save_s` after it began. If saves are hidden (`stall_s` = 0, `save_s` <= `work_s`)
    and steps are repeated whole, this is `work_s / 2 + save_s`: half an interval, and the time that a save takes. If
    they take longer than the interval, it is `work_s + save_s / 2`.

    Args:
        work_s: seconds of the steps between two saves.
        stall_s: seconds that training waits for a save before it is due again. They count as those after its beginning.
        save_s: seconds from the beginning of a save to its commit.
        repeated: seconds in which a second of these steps is repeated.
    """
    between = work_s + stall_s + _left_of_save(save_s, work_s + stall_s)  # the beginnings of two saves
    total = 0.0
    for i in range(_MOMENTS):
        since = save_s + between * (i + 0.5) / _MOMENTS  # the beginning of the newest save that is committed
        if since < between:
            total += repeated * (since - stall_s)
            continue
        # The next save was under way. It is due again after its interval, and the one after it follows.
        since -= between
        done = min(max(0.0, since - stall_s), work_s)
        following = max(save_s, stall_s + repeated * done + work_s - done)
        total += repeated * work_s + following - (between - since)
    return total / _MOMENTS


def _all_waits(time: StepTime, interval: int, stall_s: float, save_s: float) -> float:
    """Return the seconds that training waits for all saves of the run.

    Args:
        interval: steps between saves.
        stall_s: seconds that training waits for a save before it is due again.
        save_s: seconds from the beginning of a save to its commit.
    """
    before_last = (time.steps - 1) // interval
    if before_last == 0:
        return save_s
    last_steps = time.steps - before_last * interval
    joins = (before_last - 1) * _left_of_save(save_s, interval * time.total + stall_s)
    joins += _left_of_save(save_s, last_steps * time.total + stall_s)
    return before_last * stall_s + joins + save_s
