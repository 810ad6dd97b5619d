"""A plan as text for people, and as JSON for machines."""

from __future__ import annotations

import dataclasses
import io
import json
import os
from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from trainer.config import Config
from trainer.config.axes import axis_sizes
from trainer.models.verdicts import read_verdict, verdict_file
from trainer.plan.advice import LARGEST_FACTOR
from trainer.plan.hardware import COMPILED_KEEPS, GB, SHARED_SHARE, Cluster
from trainer.plan.plan import Plan
from trainer.plan.ranks import KINDS

_WIDTH = 160


def verdict(plan: Plan, changes: Mapping[str, Any] | None, larger: tuple[Cluster, Mapping[str, Any]] | None) -> str:
    """Return one sentence: whether the run fits, and what makes it fit.

    Args:
        changes: with which it fits the cluster.
        larger: a cluster on which it fits, and the changes for it.
    """
    if plan.fits:
        used = "" if plan.cluster.device.is_cpu else f", takes {plan.gpus} of {plan.cluster.gpus} GPUs"
        return f"It fits {plan.cluster}{used}: {_duration(plan.time.total)} a step, {plan.hours:.1f} hours."
    sentence = f"It does not fit {plan.cluster}: {plan.problems[0]}"
    if changes:
        return f"{sentence}; it fits with {words(changes)}."
    if larger is not None:
        return f"{sentence}; it fits {larger[0]} {f'with {words(larger[1])}' if larger[1] else 'as it is'}."
    nor_nodes = "" if plan.cluster.device.is_cpu else f", nor do {LARGEST_FACTOR} times as many nodes"
    return f"{sentence}; none of the changes that plan tries makes it fit{nor_nodes}."


def words(changes: Mapping[str, Any]) -> str:
    """Return changes as overrides of a command line."""
    return " ".join(f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in changes.items())


def as_text(cfg: Config, plan: Plan, sentence: str) -> str:
    """Return the verdict, and the tables of memory, time and saves."""
    console = Console(file=io.StringIO(), width=_WIDTH, force_terminal=False)
    console.print(sentence, soft_wrap=True)
    for problem in plan.problems[1:]:
        console.print(f"Also: {problem}.", soft_wrap=True)
    console.print()
    console.print(_memory(plan))
    console.print(_sizes(cfg, plan))
    console.print(_time(plan))
    console.print(_saves(plan))
    for note in notes(cfg, plan):
        console.print(f"Note: {note}", soft_wrap=True)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())  # type: ignore[attr-defined]


def notes(cfg: Config, plan: Plan) -> list[str]:
    """Return what the plan leaves out or only estimates, for this config."""
    found = []
    if not plan.cluster.device.is_cpu:
        found.append("times of GPUs come from data sheets, hardly any is measured; memory is that of our own code")
        shares = {COMPILED_KEEPS[role.recomputation] for role in plan.roles if role.spec.trained and role.compiled}
        for share in sorted(shares - {1.0}):
            found.append(
                f"compiled blocks count with {share:.0%} of the activations that other blocks keep, a share "
                "that was measured with few models"
            )
        if plan.cluster.nodes > 1:
            network = plan.cluster.device.network / GB
            found.append(f"each GPU sends {network:g} GB/s to other nodes; with a slower network, steps take longer")
        if any(role.model.of_experts for role in plan.roles):
            found.append(
                "passes of models with experts count at 15% of a GPU's peak, as published runs of other trainers reach "
                "(10 to 21%); ours were not measured"
            )
        if plan.shared.files and cfg.plan.shared_memory_gb is None:
            found.append(
                f"shared memory of a node counts as {SHARED_SHARE:.0%} of its memory; a container has 0.064 GB unless "
                "it was given more: plan.shared_memory_gb says how much"
            )
        idle = plan.cluster.gpus - plan.gpus
        if plan.fits and idle > 0:
            found.append(f"{idle} GPUs stay idle; trainer.num_workers and rollout.num_engines use more")
    if plan.engine is not None:
        together = min(cfg.rollout.max_num_seqs, plan.workload.rows / cfg.num_engines)
        if (most := plan.engine.sequences(plan.workload.prompt + plan.workload.response / 2)) < together:
            found.append(f"the KV cache holds {most:.0f} sequences of {together:.0f} that an engine could run together")
    if cfg.task.generates:
        found.append("time of environments, tools and rewards is not known and counts as 0")
        if plan.engine is None and cfg.num_engines:
            servers = f"rollout.engine={cfg.rollout.engine} generates outside of this cluster"
            found.append(f"{servers}: the time of rollouts, and of weights on their way there, counts as 0")
        if cfg.algorithm.dynamic_sampling and cfg.plan.gen_batches == 1:
            found.append("algorithm.dynamic_sampling samples further prompts, which plan.gen_batches=1 does not count")
        if any(environment.name for environment in cfg.environments):
            w = plan.workload
            found.append(
                f"an episode has {w.prompt + w.response:,} of at most {w.longest:,} tokens, on average, and all after "
                f"the first {w.prompt:,} count as generated and trained; plan.response_tokens says how many they are"
            )
    found += _checks(cfg, plan)
    if (slow := _slow_saves(cfg, plan)) is not None:
        found.append(slow)
    if any(map(cfg.validates, range(1, cfg.total_steps + 1))):
        found.append("hours are without validation")
    return found


def _checks(cfg: Config, plan: Plan) -> list[str]:
    """Return what earlier starts have found of the models of directories (see `trainer.models.model_check`)."""
    found: dict[str, str] = {}
    sizes = axis_sizes(cfg.trainer, cfg.trainer.num_workers)
    for role in cfg.roles if cfg.task.trains else ():
        path = role.path or cfg.model.path
        if path is None or path in found or not os.path.isdir(path):
            continue
        run = sizes, role, cfg.trainer.pack, cfg.longest_row
        verdict = read_verdict(verdict_file(cfg.model, path, plan.cluster.device.kind, *run))
        if verdict is not None:
            said = verdict.problem or "an earlier start has compared it with its own class, and nothing differs"
            found[path] = f"{role.key}={path}: {said}"
    return list(found.values())


def _slow_saves(cfg: Config, plan: Plan) -> str | None:
    """Return a note if saves take longer than the interval between them; None: they do not."""
    saves, t = plan.saves, cfg.trainer
    seconds = saves.interval_steps * plan.time.total
    if saves.save_s <= seconds or saves.interval_steps >= plan.time.steps:
        return None
    by_time = isinstance(t.ckpt_interval, int) and t.ckpt_interval != saves.interval_steps
    key = f"trainer.ckpt_interval{'_minutes' if by_time else ''}"
    ways = [f"a larger {key}", "faster storage (plan.storage_gb_s)"]
    if not t.ckpt_async:
        ways.insert(0, "trainer.ckpt_async=true")
    return (
        f"a save takes {_duration(saves.save_s)}, longer than the {_duration(seconds)} between saves "
        f"({saves.interval_steps} step{'s' if saves.interval_steps > 1 else ''}), so training waits "
        f"{_duration(saves.blocked_s)} at each; {', '.join(ways[:-1])} or {ways[-1]} makes the waits shorter"
    )


def _memory(plan: Plan) -> Table:
    kinds = [kind for kind in KINDS if any(p.sizes.get(kind) for m in plan.members for p in m.phases)]
    title = "Memory of a device, GB, at the largest moment of each phase"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", padding=(0, 1, 0, 0))
    table.add_column("process")
    table.add_column("phase", no_wrap=True)
    for kind in (*kinds, "all", "of"):
        head = kind.replace("kv_cache", "KV_cache").replace("_", "\n")
        table.add_column(head, justify="right", no_wrap=True)
    for member in plan.members:
        for i, phase in enumerate(member.phases):
            name = f"{member.name} (x{member.count})" if i == 0 else ""
            cells = [_gb(phase.sizes.get(kind, 0)) for kind in kinds]
            table.add_row(name, phase.name, *cells, _gb(phase.total), _gb(member.capacity))
    return table


def _sizes(cfg: Config, plan: Plan) -> Table:
    table = _table("Sizes")
    if plan.engine is not None:
        tokens, longest = plan.engine.tokens, plan.workload.longest
        cached = f"{tokens:,} tokens of {plan.engine.bytes_per_token:,.0f} bytes"
        cached += f"; {tokens // longest:,} of the longest sequences"
        table.add_row("KV cache of an engine", cached)
    table.add_row("host memory of a node", f"{_gb(plan.host)} of {_gb(plan.cluster.device.host_memory)} GB")
    shared = plan.shared
    table.add_row("of that, shared memory", f"{_gb(shared.total)} of {_gb(shared.capacity)} GB")
    sent, received = plan.traffic.sent, plan.traffic.received
    table.add_row("through the driver", f"{_gb(sent)} GB a step to the ranks, {_gb(received)} GB back")
    table.add_row("a checkpoint", f"{_gb(plan.saves.checkpoint)} GB")
    table.add_row("an export", f"{_gb(plan.saves.export)} GB")
    return table


def _time(plan: Plan) -> Table:
    table = _table("Time of a step")
    total = plan.time.total
    for name, seconds in plan.time.phases.items():
        table.add_row(name, f"{_duration(seconds)}, {seconds / total:.0%}")
    table.add_row("a step", f"{_duration(total)}{', engines work ahead' if plan.time.overlaps else ''}")
    table.add_row("tokens", f"{plan.time.tokens:,} a step, {plan.time.tokens_per_s:,.0f} a second")
    waits = f"{_duration(plan.saves.waits_s + plan.saves.exports_s)} of them waiting for saves and exports"
    table.add_row("all steps", f"{plan.time.steps:,} steps, {plan.hours:.1f} hours, {waits}")
    return table


def _saves(plan: Plan) -> Table:
    table, saves = _table("Saves and kills"), plan.saves
    table.add_row("a save", f"{_duration(saves.write_s)} to write, training waits {_duration(saves.blocked_s)}")
    table.add_row("interval", f"{saves.interval_steps} steps; least is lost with {saves.best_interval_steps}")
    table.add_row(
        "a kill costs",
        f"{_duration(saves.kill_s)}: {_duration(saves.restart_s)} to start, {_duration(saves.lost_s)} to repeat",
    )
    return table


def _table(title: str) -> Table:
    table = Table(box=None, title=title, title_justify="left", show_header=False, padding=(0, 2, 0, 1))
    table.add_column()
    table.add_column()
    return table


def _gb(size: int) -> str:
    return f"{size / GB:,.3f}" if size < GB else f"{size / GB:,.1f}"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s" if seconds < 100 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def as_json(
    cfg: Config,
    plan: Plan,
    sentence: str,
    changes: Mapping[str, Any] | None,
    larger: tuple[Cluster, Mapping[str, Any]] | None,
) -> dict[str, Any]:
    """Return the plan as plain values. Sizes are bytes, times are seconds.

    Args:
        changes: with which it fits the cluster.
        larger: a cluster on which it fits, and the changes for it.
    """
    saves, engine = plan.saves, plan.engine
    return {
        "verdict": sentence,
        "fits": plan.fits,
        "problems": list(plan.problems),
        "changes": dict(changes or {}),
        "larger_cluster": None if larger is None else _cluster(larger[0]),
        "larger_changes": {} if larger is None else dict(larger[1]),
        "notes": notes(cfg, plan),
        "cluster": _cluster(plan.cluster),
        "gpus": plan.gpus,
        "parameters": {role.spec.name: role.model.total for role in plan.roles},
        "memory": [
            {
                "process": member.name,
                "count": member.count,
                "capacity": member.capacity,
                "phases": {phase.name: {**phase.sizes, "all": phase.total} for phase in member.phases},
            }
            for member in plan.members
        ],
        "engine": engine
        and {"kv_cache": engine.kv_cache, "bytes_per_token": engine.bytes_per_token, "tokens": engine.tokens},
        "host": plan.host,
        "shared": plan.shared.total,
        "shared_parts": dataclasses.asdict(plan.shared),
        "traffic": {"sent": plan.traffic.sent, "received": plan.traffic.received},
        "checkpoint": saves.checkpoint,
        "export": saves.export,
        "seconds": {**plan.time.phases, "step": plan.time.total},
        "tokens_per_s": plan.time.tokens_per_s,
        "hours": plan.hours,
        "save": {
            "write": saves.write_s,
            "all": saves.save_s,
            "blocked": saves.blocked_s,
            "blocked_in_run": saves.waits_s,
            "exports_in_run": saves.exports_s,
        },
        "interval_steps": {"chosen": saves.interval_steps, "best": saves.best_interval_steps},
        "kill": {"restart": saves.restart_s, "lost": saves.lost_s, "all": saves.kill_s},
    }


def _cluster(cluster: Cluster) -> dict[str, Any]:
    return {"nodes": cluster.nodes, "per_node": cluster.per_node, "device": cluster.device.name}
