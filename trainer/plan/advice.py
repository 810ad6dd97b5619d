"""The smallest changes of a config that make a run fit its cluster."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trainer.config import Config, validate
from trainer.config.fields import value_of
from trainer.errors import UserError
from trainer.plan.hardware import Cluster
from trainer.plan.plan import Plan, make_plan

Change = dict[str, Any]
"""New values of keys."""
_LOWEST_UTILIZATION = 0.3
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
    again, then smaller micro-batches, then more ranks.
    """
    ladder = [step for step in _ladder(cfg, cluster) if _plan(cfg, cluster, step) is not None]
    chosen: list[Change] = []
    for step in ladder:
        chosen = [*(one for one in chosen if one.keys() != step.keys()), step]
        plan = _plan(cfg, cluster, _joined(chosen))
        if plan is not None and plan.fits:
            return _joined(_weakened(cfg, cluster, chosen, ladder))
    return None


def _weakened(cfg: Config, cluster: Cluster, chosen: Sequence[Change], ladder: Sequence[Change]) -> list[Change]:
    """Return the changes without those that are not needed, and each of the others as weak as possible."""
    kept = list(chosen)
    for change in reversed(chosen):
        others = [one for one in kept if one is not change]
        weaker = [one for one in ladder if one.keys() == change.keys()]
        for instead in ({}, *weaker[: weaker.index(change) + 1]):
            plan = _plan(cfg, cluster, _joined([*others, instead]))
            if plan is not None and plan.fits:
                kept = [*others, instead] if instead else others
                break
    return kept


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
    if cfg.num_engines and not cluster.device.is_cpu:
        lower = round(r.gpu_memory_utilization - 0.05, 2)
        while r.colocate and lower >= _LOWEST_UTILIZATION:
            yield {"rollout.gpu_memory_utilization": lower}
            lower = round(lower - 0.05, 2)
        if not r.colocate and r.gpu_memory_utilization < 0.92:
            yield {"rollout.gpu_memory_utilization": 0.92}
        if r.colocate:
            yield from ({"trainer.offload": value} for value in _above(t.offload, ("none", "optimizer", "all")))
        for size in (2, 4, 8):
            if r.tensor_parallel_size < size <= cluster.per_node and r.num_engines * r.tensor_parallel_size % size == 0:
                engines = r.num_engines * r.tensor_parallel_size // size
                yield {"rollout.tensor_parallel_size": size, "rollout.num_engines": engines}
    if trained:
        modes = ("none", "selective", "full")
        for mode in _above(trained[0].sharding.activation_checkpointing, modes):  # type: ignore[attr-defined]
            yield {f"{role.section}.fsdp.activation_checkpointing": mode for role in trained}
    fewer = t.max_tokens_per_micro_batch // 2
    while fewer >= max(_FEWEST_TOKENS, cfg.longest_sequence // t.context_parallel_size):
        yield {"trainer.max_tokens_per_micro_batch": fewer}
        fewer //= 2
    ranks = 2 * t.num_workers
    while ranks <= cluster.gpus and not cluster.device.is_cpu:
        yield {"trainer.num_workers": ranks}
        ranks *= 2
    if trained and not cluster.device.is_cpu:
        yield {f"{role.section}.fsdp.cpu_offload": True for role in trained}


def _above(value: str, values: Sequence[str]) -> Sequence[str]:
    return values[values.index(value) + 1 :]


def larger_cluster(cfg: Config, cluster: Cluster) -> tuple[Cluster, Change] | None:
    """Return the smallest number of such nodes, of up to 64 times as many, on which the run fits; None: none is."""
    if cluster.device.is_cpu:
        return None
    factor = 2
    while factor <= 64:
        larger = Cluster(cluster.nodes * factor, cluster.per_node, cluster.device)
        changes: Change = {"trainer.num_workers": cfg.trainer.num_workers * factor}
        plan = _plan(cfg, larger, changes)
        if plan is not None and plan.fits:
            return larger, changes
        factor *= 2
    return None
