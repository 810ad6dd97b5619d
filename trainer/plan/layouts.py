"""The best of a few whole layouts of a run on a cluster: where ranks and engines run, and what saves memory."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer.config import Config, validate
from trainer.config.fields import value_of
from trainer.errors import UserError
from trainer.plan.hardware import Cluster
from trainer.plan.plan import Plan, make_plan

Changes = Mapping[str, Any]
"""New values of keys."""
_LORA_RANK = 32


@dataclass(frozen=True)
class Layout:
    """A layout with which a run fits."""

    changes: Changes
    plan: Plan


def best_layout(cfg: Config, cluster: Cluster) -> Layout | None:
    """Return the layout of `layouts` with the shortest step that fits; None: none does.

    Each is timed once. Activations, which take most of the time of a plan, are traced for the fastest ones alone, until
    one fits. Adapters train something else, so a layout with them is the best only if no other fits.
    """
    found = []
    for changes in layouts(cfg, cluster):
        try:
            changed = with_changes(cfg, changes)
            plan = make_plan(changed, cluster, traced=False)
        except UserError:  # the model or another key does not allow it
            continue
        if plan.fits:
            found.append((_has_adapters(changed) and not _has_adapters(cfg), plan.time.total, changes, changed))
    for *_, changes, changed in sorted(found, key=lambda layout: layout[:2]):
        if (plan := make_plan(changed, cluster)).fits:
            return Layout({key: value for key, value in changes.items() if value != value_of(cfg, key)}, plan)
    return None


def layouts(cfg: Config, cluster: Cluster) -> list[Changes]:
    """Return at most 12 layouts, as changes of a config."""
    if not cfg.task.trains:
        return [{}]
    lean = {"trainer.max_tokens_per_micro_batch": max(1024, cfg.longest_row), **_of_models(cfg, _CHECKPOINTING, "full")}
    lora = {"trainer.policy.lora.rank": _LORA_RANK}
    on_host = _of_models(cfg, "cpu_offload", True)
    if cluster.device.is_cpu:
        one = {"trainer.num_workers": cfg.trainer.layout_size}
        one |= {"rollout.num_engines": 1} if cfg.num_engines else {}
        return [{}, one, {**one, **lean}, {**one, **lora}, {**one, **lean, **lora}]
    large = min(8, cluster.per_node)
    shared = [_shared(cfg, cluster, size) for size in (1, large)]
    if not cfg.num_engines or not cfg.engine.gpus:
        shared = [{"trainer.num_workers": _multiple(cfg, cluster.gpus)}] * 2
    split = {**shared[1], **lean, "trainer.context_parallel_size": large}
    return [
        {},
        shared[0],
        {**shared[0], **lean},
        {**shared[1], **lean},
        _separate(cfg, cluster, 1),
        {**_separate(cfg, cluster, large), **lean},
        split,
        {**shared[1], **lean, "trainer.tensor_parallel_size": large},
        {**shared[1], **lean, **on_host},
        {**shared[0], **lora},
        {**shared[1], **lean, **lora},
        {**split, **on_host, **lora},
    ]


_CHECKPOINTING = "activation_checkpointing"


def _multiple(cfg: Config, gpus: int) -> int:
    """Return the most ranks of a role that these GPUs have room for, as a multiple of those that the axes need."""
    return gpus // cfg.trainer.layout_size * cfg.trainer.layout_size


def _shared(cfg: Config, cluster: Cluster, size: int) -> Changes:
    """Return the layout in which engines of `size` GPUs share the GPUs of all ranks."""
    ranks = _multiple(cfg, cluster.gpus)
    return {
        "rollout.colocate": True,
        "trainer.offload": "all",
        "trainer.num_workers": ranks,
        "rollout.num_engines": max(1, ranks // size),
        "rollout.tensor_parallel_size": size,
        "rollout.gpu_memory_utilization": 0.8,
    }


def _separate(cfg: Config, cluster: Cluster, size: int) -> Changes:
    """Return the layout in which engines of at most `size` GPUs have half of the GPUs, and the ranks the others."""
    if not cfg.num_engines or not cfg.engine.gpus or cluster.gpus < 2:
        return {}
    size = min(size, cluster.gpus // 2)
    engines = max(1, cluster.gpus // 2 // size)
    return {
        "rollout.colocate": False,
        "trainer.offload": "none",
        "trainer.num_workers": _multiple(cfg, cluster.gpus - engines * size),
        "rollout.num_engines": engines,
        "rollout.tensor_parallel_size": size,
        "rollout.gpu_memory_utilization": 0.9,
    }


def _of_models(cfg: Config, key: str, value: Any) -> Changes:
    """Return a key of `fsdp` for each model of the run that has one of its own."""
    sections = (role.section for role in cfg.roles if role.section and not role.is_policy_base)
    keys = [f"{section}.fsdp.{key}" for section in sections]
    return {name: value for name in keys if hasattr(value_of(cfg, name.rpartition(".")[0]), key)}


def _has_adapters(cfg: Config) -> bool:
    return any(role.has_adapters for role in cfg.roles)


def with_changes(cfg: Config, changes: Changes) -> Config:
    """Return the config with new values of some keys.

    Raises:
        UserError: they contradict each other, or the rest of the config.
    """
    cfg = copy.copy(cfg)
    for key, value in changes.items():
        *sections, name = key.split(".")
        section: Any = cfg
        for one in sections:
            setattr(section, one, copy.copy(value_of(section, one)))
            section = getattr(section, one)
        setattr(section, name, value)
    validate(cfg)
    return cfg
