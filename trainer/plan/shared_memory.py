"""What a run puts into the shared memory of a node, `/dev/shm`, and whether it fits there."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.cluster.ray_head import CPU_OBJECT_STORE_BYTES
from trainer.cluster.resources import rank_groups
from trainer.config import Config
from trainer.config.trainer import PROCESSES
from trainer.config.transports import TRANSPORTS
from trainer.errors import format_size
from trainer.files.shared_memory import SHARED_MEMORY, object_store_share
from trainer.plan.checkpoints import PlannedSaves, checkpoint_bytes
from trainer.plan.hardware import Cluster, Device
from trainer.plan.model_shape import ModelShape
from trainer.plan.ranks import PlannedRole, writes_shared_memory


@dataclass(frozen=True)
class PlannedShared:
    """Bytes of shared memory on the node that has most in it: that of rank 0."""

    weights: int
    """Of the policy, on their way to the engines."""
    checkpoint: int
    """What one checkpoint of `trainer.ckpt_cache_dir` puts there: shards, and copies of those of other nodes."""
    checkpoints: int
    """How many of them are there at most."""
    objects: int
    """Of Ray's object store. 0: there is none, or it has no room here and is on a disk."""
    capacity: int

    @property
    def files(self) -> int:
        """Bytes of files that the run writes itself."""
        return self.weights + self.checkpoints * self.checkpoint

    @property
    def total(self) -> int:
        return self.files + self.objects

    def problem(self, cfg: Config) -> str | None:
        """Return why a run cannot work with so much shared memory, and the key to change; None: it can."""
        if not self.files or self.total <= self.capacity:
            return None
        parts = [f"{format_size(self.weights)} of weights for the engines"] if self.weights else []
        larger = f"make {SHARED_MEMORY} larger (in a container: --shm-size)"
        remedy = f"{larger}, or choose rollout.weight_sync=broadcast"
        if self.checkpoints:
            plural = "s" if self.checkpoints > 1 else ""
            parts.append(f"{self.checkpoints} checkpoint{plural} of {format_size(self.checkpoint)}")
            if self.weights + self.objects <= self.capacity:
                remedy = "choose a smaller trainer.max_ckpts_to_keep, or a disk for trainer.ckpt_cache_dir"
        elif "broadcast" not in cfg.engine.transports:
            remedy = larger
        if self.objects:
            parts.append(f"{format_size(self.objects)} of Ray's objects")
        sizes = f"{format_size(self.total)} of {format_size(self.capacity)} on a node"
        return f"shared memory: {sizes} ({', '.join(parts)}); {remedy}"


def plan_shared(
    cfg: Config,
    cluster: Cluster,
    roles: Sequence[Sequence[PlannedRole]],
    policy: ModelShape,
    saves: PlannedSaves,
    step_s: float,
) -> PlannedShared:
    """Return what a run puts into shared memory.

    Args:
        roles: of each group of ranks.
        policy: the complete model, without tensor parallelism.
        step_s: seconds of a step.
    """
    weights = shared_weights(cfg, policy, cluster.device)
    checkpoint = _bytes_of_node(cfg, cluster, roles) if caches_in_memory(cfg) else 0
    checkpoints = most_checkpoints(cfg, saves.interval_steps, saves.write_s / step_s) if checkpoint else 0
    capacity = cluster.device.shared_limit
    # The check before the first step reserves as much, whatever the size of the store.
    reserved = 0 if cfg.trainer.ray_address == PROCESSES else CPU_OBJECT_STORE_BYTES
    return PlannedShared(weights, checkpoint, checkpoints, object_store_share(reserved, capacity), capacity)


def shared_weights(cfg: Config, policy: ModelShape, device: Device) -> int:
    """Return the bytes of the policy's weights that go to the engines through shared memory.

    Args:
        policy: the complete model, without tensor parallelism.
    """
    if not (cfg.task.generates and cfg.task.trains and cfg.num_engines) or cfg.syncs_adapter:
        return 0
    ways = cfg.engine.transports
    has_own = any(way not in TRANSPORTS for way in ways)
    if not writes_shared_memory(cfg, device.kind) or cfg.rollout.weight_sync == "auto" and has_own:
        return 0
    is_half = cfg.rollout.dtype == "bfloat16" or cfg.rollout.dtype == "auto" and not device.is_cpu
    return (2 if is_half else 4) * policy.total


def caches_in_memory(cfg: Config) -> bool:
    """Return whether `trainer.ckpt_cache_dir` is in shared memory."""
    directory = cfg.trainer.ckpt_cache_dir
    if directory is None or not cfg.task.trains:
        return False
    memory = os.path.realpath(SHARED_MEMORY)
    return os.path.commonpath([os.path.realpath(directory), memory]) == memory


def most_checkpoints(cfg: Config, interval: int, upload_steps: float) -> int:
    """Return how many checkpoints a node holds at most, with the one that is being written.

    The newest one in the object store stays, and so do all newer ones, until the next is uploaded. Uploads follow one
    another, each takes the newest checkpoint. While one is uploaded, those wait that were saved since the upload before
    it began.

    Args:
        interval: steps between saves.
        upload_steps: steps that a run trains while a checkpoint is uploaded.
    """
    t, steps = cfg.trainer, cfg.total_steps
    every = math.ceil(steps / interval)
    if t.max_ckpts_to_keep < 0:
        return every
    kept = t.max_ckpts_to_keep + t.keep_best
    if t.keep_every > 0:
        kept += steps // math.lcm(t.keep_every, interval)
    saved_meanwhile = upload_steps / interval
    waiting = 1 if saved_meanwhile <= 1 else math.ceil(2 * saved_meanwhile)
    return min(every, max(kept, 1 + waiting) + 1)


def _bytes_of_node(cfg: Config, cluster: Cluster, groups: Sequence[Sequence[PlannedRole]]) -> int:
    """Return the bytes of a checkpoint on the fullest node, with the copies for `trainer.ckpt_replicas` other nodes."""
    ranks, total = cfg.trainer.num_workers, 0
    left = ranks * len(groups) if cluster.device.is_cpu else cluster.per_node
    for size in sorted(map(checkpoint_bytes, groups), reverse=True):
        of_node = min(left, ranks)
        total += size * of_node // ranks
        left -= of_node
    nodes = 1 if cluster.device.is_cpu else min(cluster.nodes, -(-ranks * rank_groups(cfg) // cluster.per_node))
    return total * (1 + min(cfg.trainer.ckpt_replicas, nodes - 1))
