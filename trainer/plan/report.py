"""A plan as text."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from trainer.config import Config
from trainer.models.model_check import read_verdict, verdict_file
from trainer.parallel.axes import axis_sizes
from trainer.plan.hardware import GB
from trainer.plan.layouts import Changes, Layout
from trainer.plan.plan import Plan
from trainer.plan.ranks import KINDS

_WIDTH = 160
_FASTER = 0.95
"""Share of the step of the config that a layout must stay below to be named."""


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


def as_text(cfg: Config, plan: Plan, layouts: Sequence[Layout]) -> str:
    """Return the verdict, and the tables of memory, time, disk and layouts (see `timed_layouts`)."""
    best = next((layout for layout in layouts if layout.fits), None)
    console = Console(file=io.StringIO(), width=_WIDTH, force_terminal=False)
    console.print(verdict(plan, best), soft_wrap=True)
    for problem in plan.problems[1:]:
        console.print(f"Also: {problem}.", soft_wrap=True)
    console.print("", _memory(plan), _table("Time of a step", _times(plan)), _table("Sizes", _sizes(plan)))
    rows = []
    for layout in layouts:
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
        file = verdict_file(cfg.model, path, sizes, role, cfg.trainer.pack, cfg.longest_row)
        if (known := read_verdict(file)) is not None:
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
