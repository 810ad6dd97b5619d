"""The report: a plan as text, and the best of a few whole layouts: where ranks and engines run, what saves memory."""

from __future__ import annotations

import copy
import io
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from trainer.config import Config, validate
from trainer.config.fields import value_of
from trainer.errors import UserError
from trainer.models.model_check import read_verdict, verdict_file
from trainer.parallel.axes import axis_sizes
from trainer.plan.hardware import GB, Cluster
from trainer.plan.plan import Plan, make_plan
from trainer.plan.ranks import KINDS

Changes = Mapping[str, Any]
"""New values of keys."""
_LORA_RANK = 32
_WIDTH = 160
_FASTER = 0.95
"""Share of the step of the config that a layout must stay below to be named."""


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
    cfg = copy.deepcopy(cfg)
    for key, value in changes.items():
        section, _, name = key.rpartition(".")
        setattr(value_of(cfg, section), name, value)
    validate(cfg)
    return cfg


def verdict(plan: Plan, best: Layout | None) -> str:
    """Return one sentence: whether the run fits, and the best layout if it does not, or if that is faster."""
    if plan.fits:
        used = "" if plan.cluster.device.is_cpu else f", takes {plan.gpus} of {plan.cluster.gpus} GPUs"
        sentence = f"It fits {plan.cluster}{used}: {_duration(plan.time.total)} a step, {plan.hours:.1f} hours"
        if best is not None and best.changes and best.plan.time.total < _FASTER * plan.time.total:
            sentence += f"; {_duration(best.plan.time.total)} a step with {words(best.changes)}"
        return f"{sentence}."
    sentence = f"It does not fit {plan.cluster}: {plan.problems[0]}"
    if best is None:
        return f"{sentence}; none of the layouts that plan tries makes it fit."
    return f"{sentence}; it fits with {words(best.changes)}: {_duration(best.plan.time.total)} a step."


def words(changes: Changes) -> str:
    """Return changes as overrides of a command line."""
    return " ".join(f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in changes.items())


def as_text(cfg: Config, plan: Plan, timed: Sequence[Layout]) -> str:
    """Return the verdict, and the tables of memory, time, disk and layouts (see `timed_layouts`)."""
    best = next((layout for layout in timed if layout.fits), None)
    console = Console(file=io.StringIO(), width=_WIDTH, force_terminal=False)
    console.print(verdict(plan, best), soft_wrap=True)
    for problem in plan.problems[1:]:
        console.print(f"Also: {problem}.", soft_wrap=True)
    console.print("", _memory(plan), _table("Time of a step", _times(plan)), _table("Sizes", _sizes(plan)))
    rows = []
    for layout in timed:
        state = "fits" if layout.fits else layout.plan.problems[0] if layout.plan.problems else "not checked"
        rows.append((layout.name, _duration(layout.plan.time.total), state))
    console.print(_table("Layouts: the time of a step, and whether it fits", rows))
    for note in notes(cfg, plan):
        console.print(f"Note: {note}", soft_wrap=True)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())  # type: ignore[attr-defined]


def notes(cfg: Config, plan: Plan) -> list[str]:
    """Return what the plan leaves out or only estimates for this config, and what earlier starts have found of its
    models (see `trainer.models.model_check`)."""
    found, cluster = [], plan.cluster
    if not cluster.device.is_cpu:
        found.append("times of GPUs come from data sheets, hardly any is measured; memory is that of our own code")
        if cluster.nodes > 1:
            found.append(f"each GPU sends {cluster.device.network / GB:g} GB/s to other nodes; check your network")
        if any(role.model.of_experts for role in plan.roles):
            found.append("passes of models with experts count at 15% of a GPU's peak, as other trainers publish")
    if cfg.task.generates:
        found.append("time of environments, tools, rewards and validation is not known and counts as 0")
        if plan.engine is None and cfg.num_engines:
            found.append(f"rollout.engine={cfg.rollout.engine} generates outside of this cluster: its time counts as 0")
    checked = dict[str, str]()
    sizes = axis_sizes(cfg.trainer, cfg.trainer.num_workers)
    for role in cfg.roles if cfg.task.trains else ():
        path = role.path or cfg.model.path
        if path is None or path in checked or not os.path.isdir(path):
            continue
        if (known := read_verdict(verdict_file(cfg, path, sizes, role))) is not None:
            said = known.problem or "an earlier start has compared it with its own class, and nothing differs"
            checked[path] = f"{role.path_key}={path}: {said}"
    return [*found, *checked.values()]


def _memory(plan: Plan) -> Table:
    kinds = [kind for kind in KINDS if any(p.sizes.get(kind) for m in plan.members for p in m.phases)]
    title = "Memory of a device, GB, at the largest moment of each phase"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", padding=(0, 1, 0, 0))
    table.add_column("process")
    table.add_column("phase", no_wrap=True)
    for kind in (*kinds, "all", "of"):
        table.add_column(kind.replace("kv_cache", "KV_cache").replace("_", "\n"), justify="right", no_wrap=True)
    for member in plan.members:
        for i, phase in enumerate(member.phases):
            name = f"{member.name} (x{member.count})" if i == 0 else ""
            cells = [_gb(phase.sizes.get(kind, 0)) for kind in kinds]
            table.add_row(name, phase.name, *cells, _gb(phase.total), _gb(member.capacity))
    return table


def _times(plan: Plan) -> Iterable[tuple[str, str]]:
    for name, seconds in plan.time.phases.items():
        yield name, f"{_duration(seconds)}, {seconds / plan.time.total:.0%}"
    yield "a step", f"{_duration(plan.time.total)}{', engines work ahead' if plan.time.overlaps else ''}"
    yield "tokens", f"{plan.time.tokens:,} a step, {plan.time.tokens_per_s:,.0f} a second"
    work, keys = plan.workload, "plan.prompt_tokens, plan.response_tokens"
    means = f"{work.prompt:,} tokens of a prompt and {work.response:,} of a response on average ({keys})"
    yield "lengths assumed", f"{means}, {work.longest:,} of both at most"
    yield "all steps", f"{plan.time.steps:,} steps, {plan.hours:.1f} hours"


def _sizes(plan: Plan) -> Iterable[tuple[str, str]]:
    disk = plan.disk
    if plan.engine is not None:
        tokens, longest = plan.engine.tokens, plan.workload.longest
        cached = f"{tokens:,} tokens of {plan.engine.bytes_per_token:,.0f} bytes"
        yield "KV cache of an engine", f"{cached}; {tokens // longest:,} of the longest sequences"
    yield "host memory of a node", f"{_gb(plan.host)} of {_gb(plan.cluster.device.host_memory)} GB"
    save = f"every {disk.interval_steps} steps, {_duration(disk.save_s)} to save"
    yield "a checkpoint", f"{_gb(disk.checkpoint)} GB, {save}"
    yield "an export", f"{_gb(disk.export)} GB"
    yield "disk", f"{_gb(disk.total)} GB for what is kept: {disk.kept} checkpoints (trainer.max_ckpts_to_keep), exports"


def _table(title: str, rows: Iterable[Sequence[str]]) -> Table:
    table = Table(box=None, title=title, title_justify="left", show_header=False, padding=(0, 2, 0, 1))
    for row in rows:
        table.add_row(*row)
    return table


def _gb(size: int) -> str:
    return f"{size / GB:,.3f}" if size < GB else f"{size / GB:,.1f}"


def _duration(seconds: float) -> str:
    if seconds < 600:
        return f"{seconds:.3g} s" if seconds < 100 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
