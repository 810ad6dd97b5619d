"""The time of a step by phase: FLOPs and bytes, divided by what the hardware reaches of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from trainer.config import Config
from trainer.parallel.axes import axis_sizes
from trainer.plan import hardware
from trainer.plan.engines import PlannedEngine
from trainer.plan.hardware import Cluster
from trainer.plan.model_shape import ModelShape
from trainer.plan.ranks import PlannedRole
from trainer.plan.workload import Sizes, Workload, scored_share


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


def plan_time(
    cfg: Config,
    cluster: Cluster,
    roles: Sequence[PlannedRole],
    whole: ModelShape,
    engine: PlannedEngine | None,
    workload: Workload,
) -> StepTime:
    """Return the time of a step."""
    phases = dict.fromkeys(("rollout", "scores", "update", "sync", "copies"), 0.0)
    crowd = max(1.0, cfg.trainer.num_workers / cluster.per_node) if cluster.device.is_cpu else 1.0  # ranks of a core
    driver = workload.rows * hardware.ROW_S[cluster.device.kind]
    for role in roles:
        share = scored_share(cfg, role.spec, workload)
        if share > 0:
            seconds = pass_seconds(cfg, cluster, role, workload, workload.computed_tokens, trained=False)
            phases["scores"] += share * crowd * seconds + driver
        if role.spec.trained:
            seconds = pass_seconds(cfg, cluster, role, workload, workload.computed_in_update, trained=True)
            phases["update"] += crowd * workload.optimizer_steps * seconds + driver
    if engine is not None:
        phases["rollout"] = rollout_seconds(cfg, cluster, whole, engine, workload)
        phases["sync"] = _sync_seconds(cfg, cluster, whole, engine)
    if not cluster.device.is_cpu:
        phases["copies"] = _copied_bytes(cfg, roles, engine) / cluster.device.pcie
    phases["other"] = hardware.OTHER * sum(phases.values())
    taken = {name: seconds for name, seconds in phases.items() if seconds > 0}
    return StepTime(taken, cfg.total_steps, cfg.rollout.works_ahead and engine is not None, workload.tokens)


def pass_seconds(
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


def rollout_seconds(
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
