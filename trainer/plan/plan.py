"""The plan of a run on a cluster: memory of ranks, engines and hosts, checkpoints, time, and whether it fits."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from trainer.cluster.resources import check_gpus, rank_groups
from trainer.config import Config
from trainer.config.axes import axis_sizes
from trainer.errors import UserError
from trainer.plan.checkpoints import PlannedSaves, plan_saves
from trainer.plan.engines import PlannedEngine, engine_problem, plan_engine
from trainer.plan.hardware import CONTEXT_BYTES, DRIVER_BYTES, GB, PROCESS_BYTES, Cluster
from trainer.plan.model_shape import shape_of
from trainer.plan.ranks import (
    ENGINE_KINDS,
    Phase,
    PlannedRole,
    host_bytes_of_rank,
    plan_role,
    rank_phases,
)
from trainer.plan.shared_memory import PlannedShared, plan_shared
from trainer.plan.timing import StepTime, plan_time
from trainer.plan.workload import Workload, scored_share, workload_of

_SCORED_BYTES, _TRAINED_BYTES = 8, 28
"""Bytes of a token in the batches that ranks score and train on: ids and mask; then advantages and log-probs, too."""

BESIDE = " and engine"
"""Ends the name of ranks that share their GPUs with engines."""


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
class Traffic:
    """Bytes that pass through the driver in a step."""

    sent: int
    """To the ranks together: each gets its rows once to score them, and once to train on them."""
    received: int
    """From ranks and engines: tokens with their log-probs, and scores."""


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
    shared: PlannedShared
    """What is in shared memory on the fullest node; a part of `host`."""
    traffic: Traffic
    time: StepTime
    saves: PlannedSaves
    problems: tuple[str, ...]
    """Why it does not fit. Empty: it fits."""

    @property
    def fits(self) -> bool:
        return not self.problems

    @property
    def hours(self) -> float:
        """Hours to the end of the run, without failures: the steps, the waits for saves, and those for the exports of
        `trainer.hf_save_interval`."""
        return (self.time.total * self.time.steps + self.saves.waits_s + self.saves.exports_s) / 3600


def make_plan(cfg: Config, cluster: Cluster, traced: bool = True, bounded: Collection[str] = ()) -> Plan:
    """Return the plan of the run that a config describes.

    Args:
        traced: False: activations count as nothing, which takes no time. What does not fit so does not fit.
        bounded: passes that are not traced, `update` or `scores`. Their activations count as the most of those that
            were traced with smaller micro-batches, or as nothing. What does not fit so does not fit either.

    Raises:
        UserError: the model cannot be split so, or there is none.
    """
    device = cluster.device
    problems = _problems_of_sizes(cfg, cluster)
    sizes = axis_sizes(cfg.trainer, cfg.trainer.num_workers)
    whole = shape_of(cfg, cfg.roles[0], dict.fromkeys(sizes, 1))
    workload = workload_of(cfg, sizes, whole.packs)
    planned = cfg.roles if cfg.task.trains else ()
    roles = tuple(plan_role(cfg, role, sizes, workload, device.kind, traced, bounded) for role in planned)
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
    groups = _groups(cfg, roles)
    copy = max((sum(role.saved for role in group) for group in groups), default=0) / device.pcie
    seconds = plan_time(cfg, cluster, roles, whole, engine, workload)
    storage = cfg.plan.storage_gb_s * GB * max(1, min(cluster.nodes, -(-cfg.trainer.num_workers // cluster.per_node)))
    traffic = _traffic(cfg, workload)
    saves = plan_saves(cfg, roles, seconds, copy, storage, device.is_cpu)
    # Without the time of activations a step seems short, and more checkpoints seem to wait for their uploads.
    shared = plan_shared(cfg, cluster, groups, whole, saves, seconds.total if traced else math.inf)
    host = _host(cfg, cluster, roles, engine, members, shared)
    if host > device.host_memory:
        problems.append(f"host memory: {host / GB:.0f} GB of {device.host_memory / GB:.0f} GB on a node")
    if (problem := shared.problem(cfg)) is not None:
        problems.append(problem)
    count = sum(member.count for member in members)
    return Plan(
        cluster, count, workload, roles, tuple(members), engine, host, shared, traffic, seconds, saves, tuple(problems)
    )


def _traffic(cfg: Config, workload: Workload) -> Traffic:
    """Return the traffic of a step. Rows are padded to the longest one."""
    numbers = workload.rows * workload.longest
    scored = sum(scored_share(cfg, role, workload) > 0 for role in cfg.roles)
    sampled = 8 * workload.rows * workload.response if cfg.task.generates else 0
    return Traffic(numbers * (_SCORED_BYTES + _TRAINED_BYTES), 4 * scored * numbers + sampled)


def _problems_of_sizes(cfg: Config, cluster: Cluster) -> list[str]:
    """Return why the run has not enough GPUs, as a list of at most one sentence."""
    if cluster.device.is_cpu:
        return []
    try:
        check_gpus(cfg, cluster.gpus)
    except UserError as error:
        return [str(error)]
    return []


def _groups(cfg: Config, roles: Sequence[PlannedRole]) -> list[Sequence[PlannedRole]]:
    """Return the roles of each group of ranks."""
    if not roles:
        return []
    return [roles] if cfg.trainer.colocate_roles else [[role] for role in roles]


def _members(
    cfg: Config, cluster: Cluster, roles: Sequence[PlannedRole], engine: PlannedEngine | None, workload: Workload
) -> list[Member]:
    device, members = cluster.device, []
    beside = engine is not None and engine.gpus > 0 and cfg.rollout.colocate
    for group in _groups(cfg, roles):
        phases = rank_phases(cfg, group, workload, device)
        if beside:
            phases = [_beside_engine(phase, engine) for phase in phases]
        name = "rank" if len(group) == len(roles) else f"rank of the {group[0].spec.name}"
        reserved = tuple(phase.with_reserve(device, 2 if beside else 1) for phase in phases)
        members.append(Member(f"{name}{BESIDE}" if beside else name, cfg.trainer.num_workers, reserved, device.memory))
    if engine is not None and not beside:
        sizes = {"weights": engine.weights, "kv_cache": max(0, engine.kv_cache), "buffers": engine.workspace}
        reserved = 0 if device.is_cpu else CONTEXT_BYTES
        phase = Phase("rollout", {**sizes, "reserved": reserved})
        members.append(Member("engine", cfg.num_engines * max(1, engine.gpus), (phase,), device.memory))
    return members


def _beside_engine(phase: Phase, engine: PlannedEngine | None) -> Phase:
    """Return a phase of a rank that shares its GPU with an engine.

    The engine sleeps in all phases but the rollouts. It wakes its weights for new ones, and a save may follow.
    """
    assert engine is not None
    weights = engine.weights if phase.name in ("rollout", "save", "weights to engines") else 0
    cache, buffers = (max(0, engine.kv_cache), engine.workspace) if phase.name == "rollout" else (0, engine.graphs)
    return Phase(phase.name, {**phase.sizes, **dict(zip(ENGINE_KINDS, (weights, cache, buffers), strict=True))})


def _host(
    cfg: Config,
    cluster: Cluster,
    roles: Sequence[PlannedRole],
    engine: PlannedEngine | None,
    members: Sequence[Member],
    shared: PlannedShared,
) -> int:
    """Return the bytes of host memory on the fullest node."""
    device = cluster.device
    of_ranks = sum(host_bytes_of_rank(cfg, group) for group in _groups(cfg, roles))
    ranks = min(cfg.trainer.num_workers, cluster.per_node) if not device.is_cpu else cfg.trainer.num_workers
    processes = min(sum(member.count for member in members), cluster.per_node)
    host = DRIVER_BYTES + ranks * of_ranks + shared.files  # Ray's objects are among those of the driver
    if device.is_cpu:
        processes = rank_groups(cfg) * cfg.trainer.num_workers + cfg.num_engines
        return host + sum(member.count * member.peak.total for member in members) + processes * PROCESS_BYTES["cpu"]
    if engine is not None and cfg.rollout.colocate:  # sleeping engines keep their weights there
        host += engine.weights * min(cfg.num_engines * engine.gpus, cluster.per_node)
    return host + 2 * processes * PROCESS_BYTES["cuda"]
