"""The smallest changes of a config that make a run fit its cluster."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trainer.cluster.resources import check_gpus
from trainer.config import Config, validate
from trainer.config.fields import value_of
from trainer.errors import UserError
from trainer.plan.hardware import Cluster
from trainer.plan.plan import Plan, make_plan

Change = dict[str, Any]
"""New values of keys."""
_MOST = 0.92
"""Largest share of a GPU that vLLM can take."""
_FEWEST_TOKENS = 1024


def with_changes(cfg: Config, changes: Mapping[str, Any]) -> Config:
    """Return the config with new values of some keys.

    Raises:
        UserError: they contradict each other, or the rest of the config.
    """
    cfg = copy.deepcopy(cfg)
    for key, value in changes.items():
        section, _, name = key.rpartition(".")
        setattr(value_of(cfg, section), name, value)
    validate(cfg)
    return cfg


def find_changes(cfg: Config, cluster: Cluster) -> Change | None:
    """Return changes with which the run fits the cluster, of which none can be left out or weakened; None: none do.

    The changes that cost least are tried first: memory of engines, then what moves to the host, then work that is done
    again, then smaller micro-batches, then more GPUs for an engine, then more ranks. If there are too few GPUs, ranks
    and engines share them in any case.
    """
    if (changes := _settled(cfg, cluster, {})) is not None:
        return changes
    if not _has_gpus(cfg, cluster):
        shared: Change = {"rollout.colocate": True}
        if cfg.rollout.colocate or not _is_valid(cfg, shared):
            return None
        others = find_changes(with_changes(cfg, shared), cluster)
        return None if others is None else {**shared, **others}
    ladder = [step for step in _ladder(cfg, cluster) if _is_valid(cfg, step)]
    if _settled(cfg, cluster, _joined(ladder)) is None:
        return None
    first, last = 0, len(ladder)  # the run fits with the first `last` steps, and not with the first `first`
    while last - first > 1:
        middle = (first + last) // 2
        fits = _settled(cfg, cluster, _joined(ladder[:middle])) is not None
        first, last = (first, middle) if fits else (middle, last)
    chosen = [
        step for i, step in enumerate(ladder[:last]) if all(step.keys() != s.keys() for s in ladder[i + 1 : last])
    ]
    return _weakened(cfg, cluster, chosen, ladder)


def _weakened(cfg: Config, cluster: Cluster, chosen: Sequence[Change], ladder: Sequence[Change]) -> Change | None:
    """Return the changes without those that are not needed, and each of the others as weak as possible."""
    kept = list(chosen)
    for change in reversed(chosen):
        others = [one for one in kept if one is not change]
        weaker = [one for one in ladder if one.keys() == change.keys()]
        for instead in ({}, *weaker[: weaker.index(change)]):
            if _settled(cfg, cluster, _joined([*others, instead])) is not None:
                kept = [*others, instead] if instead else others
                break
    return _settled(cfg, cluster, _joined(kept))


def _settled(cfg: Config, cluster: Cluster, changes: Change) -> Change | None:
    """Return the changes with which the run fits: these, and the share of GPUs for engines if it must change."""
    plan = _plan(cfg, cluster, changes)
    if plan is None or plan.fits:
        return None if plan is None else changes
    of_engines = "rollout.gpu_memory_utilization"
    if plan.engine is None or any(phase.total > m.capacity for m in plan.members for phase in m.phases[1:]):
        return None  # what the engines leave is not enough in any case
    for share in _shares(cfg):
        plan = _plan(cfg, cluster, {**changes, of_engines: share})
        if plan is not None and plan.fits:
            return {**changes, of_engines: share}
    return None


def _shares(cfg: Config) -> list[float]:
    """Return other values of `rollout.gpu_memory_utilization`, the best first."""
    now, colocated = cfg.rollout.gpu_memory_utilization, cfg.rollout.colocate
    lower = [percent / 100 for percent in range(90, 25, -5) if percent / 100 < now]
    return lower if colocated else [share for share in (_MOST,) if share > now]


def _is_valid(cfg: Config, changes: Change) -> bool:
    try:
        with_changes(cfg, changes)
    except UserError:
        return False
    return True


def _joined(changes: Sequence[Change]) -> Change:
    return {key: value for change in changes for key, value in change.items()}


def _plan(cfg: Config, cluster: Cluster, changes: Change) -> Plan | None:
    try:
        return make_plan(with_changes(cfg, changes), cluster)
    except UserError:
        return None


def _ladder(cfg: Config, cluster: Cluster) -> Iterator[Change]:
    """Yield single changes, the cheapest first. A later one of a key replaces the earlier ones."""
    t, r = cfg.trainer, cfg.rollout
    trained = [role for role in cfg.roles if role.trained and role.section]
    if cfg.num_engines and r.colocate:
        yield from ({"trainer.offload": value} for value in _above(t.offload, ("none", "optimizer", "all")))
    if trained:
        modes = ("none", "selective", "full")
        for mode in _above(trained[0].sharding.activation_checkpointing, modes):  # type: ignore[attr-defined]
            yield {f"{role.section}.fsdp.activation_checkpointing": mode for role in trained}
    fewer = t.max_tokens_per_micro_batch // 2
    while fewer >= max(_FEWEST_TOKENS, cfg.longest_sequence // t.context_parallel_size):
        yield {"trainer.max_tokens_per_micro_batch": fewer}
        fewer //= 2
    if cfg.num_engines and not cluster.device.is_cpu:
        for size in (2, 4, 8):
            if r.tensor_parallel_size < size <= cluster.per_node and r.num_engines * r.tensor_parallel_size % size == 0:
                engines = r.num_engines * r.tensor_parallel_size // size
                yield {"rollout.tensor_parallel_size": size, "rollout.num_engines": engines}
    ranks = 2 * t.num_workers
    while ranks <= cluster.gpus and not cluster.device.is_cpu:
        yield {"trainer.num_workers": ranks}
        ranks *= 2
    if trained and not cluster.device.is_cpu:
        yield {f"{role.section}.fsdp.cpu_offload": True for role in trained}


def _above(value: str, values: Sequence[str]) -> Sequence[str]:
    return values[values.index(value) + 1 :]


def _has_gpus(cfg: Config, cluster: Cluster) -> bool:
    """Return whether the cluster has a GPU for each rank and engine that needs one."""
    try:
        if not cluster.device.is_cpu:
            check_gpus(cfg, cluster.gpus)
    except UserError:
        return False
    return True


def larger_cluster(cfg: Config, cluster: Cluster) -> tuple[Cluster, Change] | None:
    """Return the smallest cluster of such nodes, up to 64 times as many, on which the run fits; None: it fits none.

    The first cluster with enough GPUs is for the ranks and engines of the config. On larger ones they are as many times
    more. With the cluster come the further changes that the run needs.
    """
    if cluster.device.is_cpu:
        return None
    enough = 1 if _has_gpus(cfg, cluster) else None
    for factor in (2, 4, 8, 16, 32, 64):
        larger = Cluster(cluster.nodes * factor, cluster.per_node, cluster.device)
        if enough is None:
            if not _has_gpus(cfg, larger):
                continue
            enough = factor
        times = factor // enough
        more: Change = {"trainer.num_workers": cfg.trainer.num_workers * times} if times > 1 else {}
        if times > 1 and cfg.num_engines:
            more["rollout.num_engines"] = cfg.rollout.num_engines * times
        if not _is_valid(cfg, more):
            return None
        scaled = with_changes(cfg, more)
        if (changes := find_changes(scaled, larger)) is not None:
            return larger, {**more, **changes}
    return None
