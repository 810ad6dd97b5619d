"""The best of a few whole layouts of a run on a cluster: where ranks and engines run, and what saves memory."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
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
    """A layout of the list, with its plan."""

    name: str
    changes: Changes
    """What it changes of the config."""
    plan: Plan
    is_traced: bool = False
    """False: it does not fit without any activation, or a better one fits, so its activations count as nothing."""

    @property
    def fits(self) -> bool:
        return self.is_traced and self.plan.fits


def timed_layouts(cfg: Config, cluster: Cluster) -> list[Layout]:
    """Return the layouts of `layouts` that the model and the keys allow, the best first, each timed once.

    Those that train all weights on the GPUs come first: adapters train something else, and states in host memory make
    a step slow. Of each kind, the fastest comes first. Activations, which take most of the time of a plan, are traced
    until a layout fits.
    """
    found = []
    for name, values in layouts(cfg, cluster).items():
        changes = {key: value for key, value in values.items() if value != value_of(cfg, key)}
        try:
            changed = with_changes(cfg, changes)
            plan = make_plan(changed, cluster, traced=False)
        except UserError:  # the model or another key does not allow it
            continue
        on_host = any(role.sharding.cpu_offload for role in changed.roles)
        has_adapters = any(role.has_adapters for role in changed.roles)
        found.append(((not plan.fits, on_host, has_adapters, plan.time.total), Layout(name, changes, plan)))
    ordered = [layout for _, layout in sorted(found, key=lambda pair: pair[0])]
    for index, layout in enumerate(ordered):
        if layout.plan.fits:
            plan = make_plan(with_changes(cfg, layout.changes), cluster)
            ordered[index] = replace(layout, plan=plan, is_traced=True)
            if plan.fits:
                break
    return ordered


def layouts(cfg: Config, cluster: Cluster) -> dict[str, Changes]:
    """Return at most 12 layouts by name, as changes of a config."""
    if not cfg.task.trains:
        return {"as configured": {}}
    lean = {
        "trainer.max_tokens_per_micro_batch": max(1024, cfg.longest_row),
        "trainer.policy.fsdp.activation_checkpointing": "full",
    }
    lora = {"trainer.policy.lora.rank": _LORA_RANK}
    on_host = {"trainer.policy.fsdp.cpu_offload": True}
    if cluster.device.is_cpu:
        one = {"trainer.num_workers": cfg.trainer.layout_size}
        one |= {"rollout.num_engines": 1} if cfg.num_engines else {}
        return {
            "as configured": {},
            "few processes": one,
            "few processes, lean": {**one, **lean},
            "few processes, LoRA": {**one, **lora},
            "few processes, lean, LoRA": {**one, **lean, **lora},
        }
    large = min(8, cluster.per_node)
    small, wide = (_shared(cfg, cluster, size) for size in (1, large))
    if not cfg.num_engines or not cfg.engine.gpus:
        small = wide = {"trainer.num_workers": _multiple(cfg, cluster.gpus)}
    split = {**wide, **lean, "trainer.context_parallel_size": large}
    engines = f"engines of {large} GPUs"
    return {
        "as configured": {},
        "shared GPUs": small,
        "shared GPUs, lean": {**small, **lean},
        f"shared GPUs, {engines}, lean": {**wide, **lean},
        "half for engines": _separate(cfg, cluster, 1),
        f"half for {engines}, lean": {**_separate(cfg, cluster, large), **lean},
        "shared GPUs, lean, context parallel": split,
        "shared GPUs, lean, tensor parallel": {**wide, **lean, "trainer.tensor_parallel_size": large},
        "shared GPUs, lean, states on the host": {**wide, **lean, **on_host},
        "shared GPUs, LoRA": {**small, **lora},
        "shared GPUs, lean, LoRA": {**wide, **lean, **lora},
        "shared GPUs, lean, context parallel, LoRA, states on the host": {**split, **on_host, **lora},
    }


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
