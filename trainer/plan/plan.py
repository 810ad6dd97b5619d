"""The plan of a run on a cluster: memory of ranks, engines and hosts, disk, time, and whether it fits.

Times are FLOPs and bytes, divided by what the hardware reaches of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from trainer.cluster.resources import check_gpus, rank_groups
from trainer.config import Config
from trainer.errors import UserError, format_size
from trainer.files.shared_memory import SHARED_MEMORY
from trainer.parallel.axes import axis_sizes
from trainer.plan import hardware
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
from trainer.plan.workload import Sizes, Workload, scored_share, workload_of


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
class StepTime:
    """Seconds of a step."""

    phases: Mapping[str, float]
    steps: int
    """Of the run."""
    overlaps: bool
    """Engines generate while the ranks train."""
    tokens: int
    """Of a step: prompts and completions."""

    @property
    def rollout(self) -> float:
        return self.phases.get("rollout", 0.0)

    @property
    def total(self) -> float:
        rest = sum(self.phases.values()) - self.rollout
        return max(self.rollout, rest) if self.overlaps else self.rollout + rest

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.total


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
    for member in members if not device.is_cpu else ():
        of = f"of {member.capacity / GB:.1f} GB"
        full = [phase for phase in member.phases if phase.total > member.capacity]
        problems += [f"{member.name}, {phase.name}: {phase.total / GB:.1f} GB {of}" for phase in full]
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
    seconds = _time(cfg, cluster, roles, whole, engine, workload)
    disk = _disk(cfg, cluster, roles, seconds)
    count = sum(member.count for member in members)
    return Plan(cluster, count, workload, roles, tuple(members), engine, host, seconds, disk, tuple(problems))


def _members(
    cfg: Config, cluster: Cluster, roles: Sequence[PlannedRole], engine: PlannedEngine | None, workload: Workload
) -> list[Member]:
    device, members = cluster.device, []
    shared = engine is not None and engine.gpus > 0 and cfg.rollout.colocate
    if roles:
        phases, name = rank_phases(cfg, roles, workload), "rank and engine" if shared else "rank"
        if engine is not None and shared:
            # It sleeps in all phases but the rollouts. It wakes its weights for new ones, and a save may follow.
            for i, phase in enumerate(phases):
                weights = engine.weights if phase.name in ("rollout", "save", "weights to engines") else 0
                awake = phase.name == "rollout"
                sizes = weights, max(0, engine.kv_cache) if awake else 0, engine.workspace if awake else engine.graphs
                phases[i] = Phase(phase.name, {**phase.sizes, **dict(zip(ENGINE_KINDS, sizes, strict=True))})
        reserved = tuple(phase.with_reserve(device, 2 if shared else 1) for phase in phases)
        members.append(Member(name, cfg.trainer.num_workers, reserved, device.memory))
    if engine is not None and not shared:
        held = {"weights": engine.weights, "kv_cache": max(0, engine.kv_cache), "buffers": engine.workspace}
        phase = Phase("rollout", {**held, "reserved": 0 if device.is_cpu else CONTEXT_BYTES})
        members.append(Member("engine", cfg.num_engines * max(1, engine.gpus), (phase,), device.memory))
    return members


def shared_weights(cfg: Config, policy: ModelShape, cluster: Cluster) -> int:
    """Return the bytes of the policy's weights that go to the engines through the shared memory of a node."""
    syncs = cfg.task.generates and cfg.task.trains and cfg.num_engines and not cfg.syncs_adapter
    if not syncs or not writes_shared_memory(cfg, cluster.device.kind):
        return 0
    is_half = cfg.rollout.dtype == "bfloat16" or cfg.rollout.dtype == "auto" and not cluster.device.is_cpu
    return (2 if is_half else 4) * policy.total


def _host(
    cfg: Config, cluster: Cluster, roles: Sequence[PlannedRole], engine: PlannedEngine | None, members: Sequence[Member]
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


def _time(
    cfg: Config,
    cluster: Cluster,
    roles: Sequence[PlannedRole],
    whole: ModelShape,
    engine: PlannedEngine | None,
    workload: Workload,
) -> StepTime:
    phases = dict.fromkeys(("rollout", "scores", "update", "sync", "copies"), 0.0)
    crowd = max(1.0, cfg.trainer.num_workers / cluster.per_node) if cluster.device.is_cpu else 1.0  # ranks of a core
    driver = workload.rows * hardware.ROW_S[cluster.device.kind]
    for role in roles:
        share = scored_share(cfg, role.spec, workload)
        if share > 0:
            seconds = _pass_seconds(cfg, cluster, role, workload, workload.computed_tokens, trained=False)
            phases["scores"] += share * crowd * seconds + driver
        if role.spec.trained:
            seconds = _pass_seconds(cfg, cluster, role, workload, workload.computed_in_update, trained=True)
            phases["update"] += crowd * workload.optimizer_steps * seconds + driver
    if engine is not None:
        phases["rollout"] = _rollout_seconds(cfg, cluster, whole, engine, workload)
        phases["sync"] = _sync_seconds(cfg, cluster, whole, engine)
    if not cluster.device.is_cpu:
        phases["copies"] = _copied_bytes(cfg, roles, engine) / cluster.device.pcie
    phases["other"] = hardware.OTHER * sum(phases.values())
    taken = {name: seconds for name, seconds in phases.items() if seconds > 0}
    return StepTime(taken, cfg.total_steps, cfg.rollout.works_ahead and engine is not None, workload.tokens)


def _pass_seconds(
    cfg: Config, cluster: Cluster, role: PlannedRole, workload: Workload, tokens: float, trained: bool
) -> float:
    """Return the seconds of a pass without gradients of a role's model, or of an optimizer step."""
    device, model, n = cluster.device, role.model, role.shards
    sizes = axis_sizes(cfg.trainer, cfg.trainer.num_workers)
    again = hardware.RECOMPUTED[role.spec.sharding.activation_checkpointing] if trained else 0.0
    passes = 2 + again + model.trained / model.total if trained else 1.0
    count = workload.micro_batches(tokens)
    gathers = count * (2 if trained else 1) if role.frees_gathered else 1
    dtype = torch.bfloat16 if role.itemsize == 2 else torch.float32
    speed = device.reached(dtype, has_experts=model.of_experts > 0)
    computed = passes * _forward_flops(role, workload, tokens, sizes["tp"]) / speed
    started = model.blocks * count * hardware.BLOCK_S[device.kind] * passes * (1.2 if trained else 1)
    started += model.blocks * gathers * (n > 1) * hardware.GATHER_S[device.kind]
    between = cluster.bandwidth_between(n, sizes["tp"]) * hardware.REACHED_BANDWIDTH
    latency = (model.blocks + 1) * hardware.LATENCY_S[device.kind] * math.log2(n)
    weights = role.itemsize * model.numel() * (n - 1) / n
    sent = gathers * (weights / between + latency)
    optimizer = 0.0
    if trained:
        reduced = 4 * model.numel(trained=True)
        sent += count * (reduced * (n - 1) / n / between + latency)
        if (copies := sizes["dp_replicate"]) > 1:
            across = cluster.bandwidth_between(copies, n * sizes["tp"]) * hardware.REACHED_BANDWIDTH
            sent += count * 2 * reduced / n * (copies - 1) / copies / across
        memory = device.host_bandwidth if role.is_on_host else device.bandwidth
        optimizer = model.shard(n, trained=True) * hardware.OPTIMIZER_BYTES / (hardware.REACHED_BANDWIDTH * memory)
    if role.is_on_host:  # weights cross PCIe for each gather, gradients for the optimizer
        sent += gathers * role.state[0] / device.pcie + trained * role.gradients / device.pcie
    inside = _exchange_seconds(cluster, role, workload, tokens, sizes) * passes
    if device.is_cpu:
        return computed + started + sent + inside + optimizer
    return max(computed, started, sent) + inside + optimizer


def _forward_flops(role: PlannedRole, workload: Workload, tokens: float, tp: int) -> float:
    """Return the FLOPs of a rank in a forward pass. Attention counts as if every token attended to all before it."""
    model, text, w = role.model, role.model.text, workload
    embedding = text.vocab_size * text.hidden_size // tp
    untied = model.head_rows > 0 and not text.tie_word_embeddings
    body = model.numel() - model.idle() - embedding * (2 if untied else 1)
    of_row = w.computed_tokens / w.rows
    head = model.head_rows * text.hidden_size * w.response / of_row
    width = (getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads) * text.num_attention_heads
    length = w.prompt + w.response
    pairs = length**2 / 2 - (w.prompt**2 / 2 * (w.n - 1) / w.n if w.shares_prompts else 0)
    attention = 4 * width / tp * pairs * text.num_hidden_layers / of_row
    return tokens / w.dp / w.cp * (2 * body + 2 * head + attention)


def _exchange_seconds(cluster: Cluster, role: PlannedRole, workload: Workload, tokens: float, sizes: Sizes) -> float:
    """Return the seconds of the exchange inside blocks in a pass: sums along `tp`, tokens for heads along `cp`."""
    text, tp, cp = role.model.text, sizes["tp"], sizes["cp"]
    row = 4.0 * tokens / workload.dp / workload.cp * text.hidden_size * role.itemsize * text.num_hidden_layers
    links = [(size, cluster.bandwidth_between(size, stride)) for size, stride in ((tp, 1), (cp, tp)) if size > 1]
    return sum(row * (size - 1) / size / (link * hardware.REACHED_BANDWIDTH) for size, link in links)


def _rollout_seconds(
    cfg: Config, cluster: Cluster, policy: ModelShape, engine: PlannedEngine, workload: Workload
) -> float:
    """Return the seconds in which the engines generate the completions of a step, as one batch.

    A decoding step reads the weights, without experts that none of its tokens passes through, and the keys and values
    of all sequences. It lasts as long as that or as its products, whichever takes longer; with several GPUs, they also
    add up their results. There are at least as many as the longest completion may have tokens.
    """
    device, w, text, gpus = cluster.device, workload, policy.text, max(1, engine.gpus)
    rows = math.ceil(w.rows / cfg.num_engines)
    context = w.prompt + w.response / 2
    together = max(1.0, min(rows, cfg.rollout.max_num_seqs, engine.sequences(context)))
    steps = max(rows * w.response / together, float(w.longest_response))
    if not cfg.engine.streaming:  # the next requests wait for the longest completion of those before
        steps = max(steps, math.ceil(rows / together) * float(w.longest_response))
    running = rows * w.response / steps  # sequences in a step, on average
    bandwidth = hardware.REACHED_BANDWIDTH * device.bandwidth
    speed = device.reached(torch.float32 if engine.weights * gpus >= 4 * policy.total else torch.bfloat16)
    computed = policy.total - policy.idle() - (0 if text.tie_word_embeddings else text.vocab_size * text.hidden_size)
    weights = engine.weights * (1 - policy.idle(running) / policy.total)
    read = (weights + running * engine.cache.size(context)) / bandwidth
    of_step, of_block, of_sequence = hardware.DECODE_S[device.kind]
    sampled = running * (of_sequence + hardware.LOGIT_BYTES[device.kind] * text.vocab_size / bandwidth)
    products = 2 * computed / gpus / speed
    sums = _sum_seconds(cluster, policy, gpus, running)
    seconds = steps * (max(read, products * running) + of_step + of_block * policy.blocks + sampled + sums)
    prompts = math.ceil(w.groups / cfg.num_engines) * w.prompt
    seconds += products * prompts + _sum_seconds(cluster, policy, gpus, prompts)
    crowd = max(1.0, cfg.num_engines / cluster.per_node) if device.is_cpu else 1.0
    return crowd * seconds + w.rows * hardware.ROW_S[device.kind]


def _sum_seconds(cluster: Cluster, policy: ModelShape, gpus: int, tokens: float) -> float:
    """Return the seconds in which the GPUs of an engine add up their results for some tokens, twice in each block."""
    if gpus == 1:
        return 0.0
    size = 2 * tokens * policy.text.hidden_size
    traffic = 2 * size * (gpus - 1) / gpus / (hardware.REACHED_BANDWIDTH * cluster.device.link)
    return 2 * policy.blocks * (traffic + hardware.LATENCY_S["cuda"])


def _sync_seconds(cfg: Config, cluster: Cluster, policy: ModelShape, engine: PlannedEngine) -> float:
    """Return the seconds in which the weights, or the adapters, go from the ranks to the engines.

    The ranks gather one tensor after the other, and send them: to engines on their own GPUs through these GPUs' memory.
    """
    device, ranks, gpus = cluster.device, cfg.trainer.num_workers, max(1, engine.gpus)
    size, tensors = engine.weights * gpus, len(policy.parameters)
    if cfg.syncs_adapter:
        size, tensors = 4 * policy.trained, sum(parameter.trained for parameter in policy.parameters)
    link = cluster.bandwidth_between(ranks + (0 if cfg.rollout.colocate else cfg.num_engines * gpus))
    send = device.bandwidth if cfg.rollout.colocate else link
    moved = (size / link + size / send) / hardware.REACHED_BANDWIDTH
    return moved + tensors * hardware.LATENCY_S[device.kind] * math.log2(max(2, ranks)) + hardware.SYNC_S[device.kind]


def _copied_bytes(cfg: Config, roles: Sequence[PlannedRole], engine: PlannedEngine | None) -> float:
    """Return the bytes that a GPU which ranks and engines share exchanges with its host in a step.

    `trainer.offload` moves states to the host and back. An engine copies its weights to the host when it falls asleep,
    and back before it takes new ones.
    """
    mode, total = cfg.trainer.offload, 0.0
    if not cfg.rollout.colocate:
        return total
    for role in roles:
        if not role.is_on_host:
            weights, optimizer = role.state
            total += {"none": 0, "optimizer": optimizer, "all": weights + optimizer}[mode] * (1 + role.spec.trained)
    return total + (2 * engine.weights if engine is not None and engine.gpus else 0)
