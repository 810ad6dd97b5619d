"""The plan of a run on a cluster: memory of ranks, engines and hosts, disk, time, and whether it fits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.cluster.resources import check_gpus, rank_groups
from trainer.config import Config
from trainer.errors import UserError, format_size
from trainer.files.shared_memory import SHARED_MEMORY
from trainer.parallel.axes import axis_sizes
from trainer.plan.engines import PlannedEngine, engine_problem, plan_engine
from trainer.plan.hardware import CONTEXT_BYTES, DRIVER_BYTES, GB, PROCESS_BYTES, STORAGE, Cluster
from trainer.plan.model_shape import ModelShape, shape_of
from trainer.plan.ranks import (
    ENGINE_KINDS,
    Phase,
    PlannedRole,
    host_bytes_of_rank,
    plan_role,
    rank_phases,
    writes_shared_memory,
)
from trainer.plan.timing import StepTime, plan_time
from trainer.plan.workload import Workload, workload_of


@dataclass(frozen=True)
class Member:
    """The processes on one device: a rank, an engine, or both."""

    name: str
    count: int
    phases: tuple[Phase, ...]
    capacity: int

    @property
    def peak(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.total)


@dataclass(frozen=True)
class PlannedDisk:
    """What checkpoints and exports take, and the time of saves."""

    checkpoint: int
    """Bytes of a checkpoint."""
    export: int
    """Bytes of an export in Hugging Face format."""
    total: int
    """Bytes of all checkpoints and exports that are kept."""
    kept: int
    """Checkpoints that are kept."""
    interval_steps: int
    """Steps between saves."""
    save_s: float
    """Seconds in which a checkpoint is copied and written. Training continues meanwhile."""


@dataclass(frozen=True)
class Plan:
    """What a run needs of a cluster."""

    cluster: Cluster
    gpus: int
    """GPUs that the run takes. On CPU: processes."""
    workload: Workload
    roles: tuple[PlannedRole, ...]
    members: tuple[Member, ...]
    engine: PlannedEngine | None
    host: int
    """Bytes of host memory on the fullest node."""
    time: StepTime
    disk: PlannedDisk
    problems: tuple[str, ...]
    """Why it does not fit. Empty: it fits."""

    @property
    def fits(self) -> bool:
        return not self.problems

    @property
    def hours(self) -> float:
        """Hours to the end of the run, without failures and validation."""
        return self.time.total * self.time.steps / 3600


def make_plan(cfg: Config, cluster: Cluster, traced: bool = True) -> Plan:
    """Return the plan of the run that a config describes.

    Args:
        traced: False: activations count as nothing, which takes no time. What does not fit so does not fit.

    Raises:
        UserError: the model cannot be split so, or there is none.
    """
    device, problems = cluster.device, []
    if not device.is_cpu:
        try:
            check_gpus(cfg, cluster.gpus)
        except UserError as error:
            problems.append(str(error))
    sizes = axis_sizes(cfg.trainer, cfg.trainer.num_workers)
    whole = shape_of(cfg, cfg.roles[0], dict.fromkeys(sizes, 1))
    workload = workload_of(cfg, sizes, whole.packs)
    specs = cfg.roles if cfg.task.trains else ()
    roles = tuple(plan_role(cfg, spec, sizes, workload, device.kind, traced) for spec in specs)
    engine = plan_engine(cfg, whole, device, workload)
    members = _members(cfg, cluster, roles, engine, workload)
    for member in members:
        for phase in member.phases:
            if phase.total > member.capacity and not device.is_cpu:
                problems.append(
                    f"{member.name}, {phase.name}: {phase.total / GB:.1f} GB of {member.capacity / GB:.1f} GB"
                )
    if engine is not None and (problem := engine_problem(cfg, cluster, engine, workload, whole)) is not None:
        problems.append(f"engine: {problem}")
    shared = shared_weights(cfg, whole, cluster)
    if shared > device.shared_memory:
        problems.append(
            f"shared memory: {format_size(shared)} of weights for the engines, and {SHARED_MEMORY} has "
            f"{format_size(device.shared_memory)}; make it larger (in a container: --shm-size), or choose "
            "rollout.weight_sync=broadcast"
        )
    copies = 2 * cfg.trainer.copy_steps * cfg.trainer.num_workers * sum(role.saved for role in roles)
    if copies > max(0, device.shared_memory - shared):
        problems.append(
            f"shared memory: {format_size(copies)} of copies of steps, and {SHARED_MEMORY} has "
            f"{format_size(max(0, device.shared_memory - shared))} for them; make it larger, or choose "
            "trainer.copy_steps=false"
        )
    sent = 2 if cfg.rollout.weight_sync == "delta" else 1  # the ranks keep what they have sent, too
    host = _host(cfg, cluster, roles, engine, members) + sent * shared + copies
    if host > device.host_memory:
        problems.append(f"host memory: {host / GB:.0f} GB of {device.host_memory / GB:.0f} GB on a node")
    seconds = plan_time(cfg, cluster, roles, whole, engine, workload)
    disk = _disk(cfg, cluster, roles, seconds)
    count = sum(member.count for member in members)
    return Plan(cluster, count, workload, roles, tuple(members), engine, host, seconds, disk, tuple(problems))


def _members(
    cfg: Config, cluster: Cluster, roles: Sequence[PlannedRole], engine: PlannedEngine | None, workload: Workload
) -> list[Member]:
    device, members = cluster.device, []
    shared = engine is not None and engine.gpus > 0 and cfg.rollout.colocate
    if roles:
        phases, name = rank_phases(cfg, roles, workload), "rank"
        if shared:
            assert engine is not None
            phases, name = [_with_engine(phase, engine) for phase in phases], f"{name} and engine"
        reserved = tuple(phase.with_reserve(device, 2 if shared else 1) for phase in phases)
        members.append(Member(name, cfg.trainer.num_workers, reserved, device.memory))
    if engine is not None and not shared:
        sizes = {"weights": engine.weights, "kv_cache": max(0, engine.kv_cache), "buffers": engine.workspace}
        phase = Phase("rollout", {**sizes, "reserved": 0 if device.is_cpu else CONTEXT_BYTES})
        members.append(Member("engine", cfg.num_engines * max(1, engine.gpus), (phase,), device.memory))
    return members


def _with_engine(phase: Phase, engine: PlannedEngine) -> Phase:
    """Return a phase of a rank that shares its GPU with an engine.

    The engine sleeps in all phases but the rollouts. It wakes its weights for new ones, and a save may follow.
    """
    weights = engine.weights if phase.name in ("rollout", "save", "weights to engines") else 0
    cache, buffers = (max(0, engine.kv_cache), engine.workspace) if phase.name == "rollout" else (0, engine.graphs)
    return Phase(phase.name, {**phase.sizes, **dict(zip(ENGINE_KINDS, (weights, cache, buffers), strict=True))})


def shared_weights(cfg: Config, policy: ModelShape, cluster: Cluster) -> int:
    """Return the bytes of the policy's weights that go to the engines through the shared memory of a node."""
    syncs = cfg.task.generates and cfg.task.trains and cfg.num_engines and not cfg.syncs_adapter
    if not syncs or not writes_shared_memory(cfg, cluster.device.kind):
        return 0
    is_half = cfg.rollout.dtype == "bfloat16" or cfg.rollout.dtype == "auto" and not cluster.device.is_cpu
    return (2 if is_half else 4) * policy.total


def _host(
    cfg: Config,
    cluster: Cluster,
    roles: Sequence[PlannedRole],
    engine: PlannedEngine | None,
    members: Sequence[Member],
) -> int:
    """Return the bytes of host memory on the fullest node, without those in shared memory."""
    device = cluster.device
    ranks = cfg.trainer.num_workers if device.is_cpu else min(cfg.trainer.num_workers, cluster.per_node)
    host = DRIVER_BYTES + (ranks * host_bytes_of_rank(cfg, roles) if roles else 0)
    if device.is_cpu:
        processes = rank_groups(cfg) * cfg.trainer.num_workers + cfg.num_engines
        return host + sum(member.count * member.peak.total for member in members) + processes * PROCESS_BYTES["cpu"]
    if engine is not None and cfg.rollout.colocate:  # sleeping engines keep their weights there
        host += engine.weights * min(cfg.num_engines * engine.gpus, cluster.per_node)
    processes = min(sum(member.count for member in members), cluster.per_node)
    return host + 2 * processes * PROCESS_BYTES["cuda"]


def _disk(cfg: Config, cluster: Cluster, roles: Sequence[PlannedRole], seconds: StepTime) -> PlannedDisk:
    """Return what is written: saved weights and, of trained roles, two moments of each number; and exports."""
    t, checkpoint, export, steps = cfg.trainer, 0, 0, seconds.steps
    for role in roles:
        if role.spec.saved:
            saved = role.model.trained if role.spec.has_adapters else role.model.total
            checkpoint += 12 * role.model.trained if role.spec.trained else role.itemsize * saved
    if roles:
        itemsize = 4 if cfg.export_dtype == "float32" or cfg.export_dtype == "auto" and cluster.device.is_cpu else 2
        export = itemsize * roles[0].model.total
    copied = sum(role.saved for role in roles)
    nodes = max(1, min(cluster.nodes, math.ceil(t.num_workers / cluster.per_node)))
    write = checkpoint / (STORAGE * nodes)
    save = copied / cluster.device.pcie + write
    by_steps = isinstance(t.ckpt_interval, int) and t.ckpt_interval > 0
    interval = t.ckpt_interval if by_steps else max(1, math.ceil(2 * save / seconds.total))
    interval = min(interval, steps)
    made = math.ceil(steps / interval)
    kept = made if t.max_ckpts_to_keep < 0 else min(made, t.max_ckpts_to_keep)
    exports = math.ceil(steps / t.hf_save_interval) if t.hf_save_interval > 0 else 0
    return PlannedDisk(checkpoint, export, kept * checkpoint + exports * export, kept, interval, save)
