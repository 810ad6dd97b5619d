"""The time of a step by phase: FLOPs and bytes, divided by what the hardware reaches of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from trainer.config import Config, FSDPConfig
from trainer.config.axes import axis_sizes
from trainer.plan.attention_flops import attention_flops
from trainer.plan.engines import PlannedEngine
from trainer.plan.hardware import (
    ADAPTER_COPIES,
    CALL_RANK_S,
    CALL_ROW_S,
    CALL_S,
    CAST_LOGIT_BYTES,
    CPU_AROUND_BLOCKS,
    CPU_ATTENTION,
    CPU_BLOCK_S,
    CPU_COMPLETION_S,
    CPU_GROUP_S,
    GPU_BLOCK_S,
    GPU_GATHER_S,
    LATENCY_S,
    LOGIT_BYTES,
    OPTIMIZER_BYTES,
    OTHER,
    PACKED_BFLOAT16,
    PACKS_AGAIN,
    REACHED_BANDWIDTH,
    REACHED_PACKED,
    RECOMPUTED,
    SYNC_BYTES,
    SYNC_S,
    Cluster,
    decode_step,
)
from trainer.plan.host_copies import copies_of_engine, copies_of_ranks, offloaded
from trainer.plan.model_shape import ModelShape
from trainer.plan.ranks import PlannedRole
from trainer.plan.workload import Workload, scored_share


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
    def rest(self) -> float:
        """Seconds of all phases but the rollouts."""
        return sum(self.phases.values()) - self.rollout

    @property
    def total(self) -> float:
        return max(self.rollout, self.rest) if self.overlaps else self.rollout + self.rest

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
    """Return the time of a step.

    Args:
        whole: the policy's model, without tensor parallelism.
    """
    phases: dict[str, float] = {}
    crowd = _crowd(cfg, cluster)
    if engine is not None:
        phases["rollout"] = rollout_seconds(cfg, cluster, whole, engine, workload)
    phases["scores"] = phases["update"] = 0.0
    call = CALL_S + workload.rows * CALL_ROW_S + workload.dp * CALL_RANK_S
    for role in roles:
        passes = _Passes(cfg, cluster, role, workload, roles[0] if role.spec.is_policy_base else role)
        share = scored_share(cfg, role.spec, workload)
        if share > 0:
            phases["scores"] += share * crowd * passes.scores(workload.computed_tokens) + call
        if role.spec.trained:
            updates = workload.optimizer_steps * passes.optimizer_step(workload.computed_in_update)
            phases["update"] += crowd * updates + call
    if engine is not None:
        phases["sync"] = sync_seconds(cfg, cluster, whole, engine, roles)
    phases["other"] = OTHER * sum(phases.values())
    if not cluster.device.is_cpu:
        phases["offload"] = copies_of_ranks(cfg, roles, workload).seconds(cluster.device)
        phases["sleep"] = copies_of_engine(cfg, engine).seconds(cluster.device)
    kept = {name: seconds for name, seconds in phases.items() if seconds > 0}
    return StepTime(kept, cfg.total_steps, cfg.rollout.works_ahead and engine is not None, workload.tokens)


def _crowd(cfg: Config, cluster: Cluster) -> float:
    """Return how many ranks share a core."""
    return max(1.0, cfg.trainer.num_workers / cluster.per_node) if cluster.device.is_cpu else 1.0


class _Passes:
    """The passes of a role's model on one rank.

    Args:
        holder: the role that holds the weights. None: it is the same role.
    """

    def __init__(
        self, cfg: Config, cluster: Cluster, role: PlannedRole, workload: Workload, holder: PlannedRole | None = None
    ):
        self.role, self.cluster, self.workload = role, cluster, workload
        self.host = offloaded(holder or role, cluster.device)
        self.sizes = axis_sizes(cfg.trainer, cfg.trainer.num_workers)
        dtype = torch.bfloat16 if role.itemsize == 2 else torch.float32
        self.dtype, self.speed = dtype, cluster.device.reached(dtype, has_experts=role.model.of_experts > 0)
        text = role.model.config.get_text_config()
        self.attention = attention_flops(cfg, text, dtype, cluster.device.kind, workload, self.sizes["tp"])
        self.stride = self.sizes["tp"]
        self.ring = cluster.bandwidth_between(role.shards, self.stride) * REACHED_BANDWIDTH

    def forward_flops(self, tokens: float) -> tuple[float, float, float]:
        """Return the FLOPs of a rank in blocks, attention and output layer.

        Args:
            tokens: of all data-parallel ranks.
        """
        model, w = self.role.model, self.workload
        text = model.config.get_text_config()
        tokens_of_rank = tokens / w.dp / w.cp
        embedding = text.vocab_size * text.hidden_size // self.sizes["tp"]
        body = (
            model.numel()
            - model.idle()
            - embedding
            - (0 if text.tie_word_embeddings or not model.head_rows else embedding)
        )
        responses = w.response / max(1e-9, tokens_per_row(w))
        head = model.head_rows * text.hidden_size * responses
        attention = self.attention / tokens_per_row(w)
        return tokens_of_rank * 2 * body, tokens_of_rank * attention, tokens_of_rank * 2 * head

    def _computation(self, tokens: float, passes: float, trained: bool) -> float:
        """Return the seconds of the computation in `passes` times the FLOPs of a forward pass.

        On GPUs, the share of the peak that passes reach holds what is beside the products.
        """
        blocks, attention, head = self.forward_flops(tokens)
        if not self.cluster.device.is_cpu:
            return max(passes * (blocks + attention + head) / self.speed, self._host_seconds(tokens, passes, trained))
        device, role, row = self.cluster.device, self.role, self.role.rows[0 if trained else 1]
        products = passes * (blocks + head) + trained * head  # a backward pass computes logits again
        traced = role.update if trained else role.scores
        assert traced is not None
        moved = (traced.moved if trained else traced.moved_forward) * tokens / self.workload.dp / row.tokens
        moved += self._moved_by_head(head, trained)
        slow = passes * attention / (CPU_ATTENTION[self.dtype] * device.flops(torch.float32))
        block = CPU_BLOCK_S["alone"]
        block += CPU_BLOCK_S["shards"] * (role.shards > 1) + CPU_BLOCK_S["tp"] * (self.sizes["tp"] > 1)
        w = self.workload
        groups = w.groups * tokens / w.computed_tokens / w.dp
        calls = w.micro_batches(tokens) * block + groups * CPU_GROUP_S
        calls *= device.slowness * (role.model.blocks + CPU_AROUND_BLOCKS) * passes / 3
        return products / self.speed + slow + moved / (REACHED_BANDWIDTH * device.bandwidth) + calls

    def _host_seconds(self, tokens: float, passes: float, trained: bool) -> float:
        """Return the least seconds of passes on a GPU: those in which Python starts their kernels."""
        count = self.workload.micro_batches(tokens)
        started = GPU_BLOCK_S["update"] * passes / 3 if trained else GPU_BLOCK_S["scores"]
        return self.role.model.blocks * (count * started + self._gathers(count, trained) * GPU_GATHER_S)

    def _gathers(self, count: int, trained: bool) -> int:
        """Return how many times FSDP2 gathers a block for `count` micro-batches."""
        return count * (2 if trained else 1) if self.role.frees_gathered else 1

    def _moved_by_head(self, flops: float, trained: bool) -> float:
        """Return the bytes that the output layer moves on CPU, whose forward pass has so many FLOPs.

        Each product moves its logits. An update computes four: logits twice, and the gradients of both factors.
        """
        phase, itemsize = "update" if trained else "scores", self.role.itemsize
        of_logit = LOGIT_BYTES[phase] + itemsize * (4 if trained else 1)
        if itemsize < 4:
            of_logit += CAST_LOGIT_BYTES[phase]
        return of_logit * flops / 2 / self.role.model.config.get_text_config().hidden_size

    def _copied(self, gathers: float, reductions: float) -> float:
        """Return the seconds in which FSDP2 copies weights and gradients on CPU, beside what it sends.

        To gather, it casts its shard, and copies what has arrived into the weights. To reduce, it copies the gradients
        together as float32, and adds the sum to that of the micro-batches before. With one rank the collectives copy.
        """
        if not self.cluster.device.is_cpu:
            return 0.0
        role, n, size = self.role, self.role.shards, self.role.itemsize
        alone = n == 1
        gathered = role.model.numel() * (2 * 4 / n + 2 * size + 2 * size * alone)
        reduced = role.model.numel(trained=True) * (2 * 4 + 3 * 4 / n + 2 * 4 * alone)
        return (gathers * gathered + reductions * reduced) / (REACHED_BANDWIDTH * self.cluster.device.bandwidth)

    def scores(self, tokens: float) -> float:
        """Return the seconds of a pass without gradients over `tokens` tokens."""
        count = self.workload.micro_batches(tokens)
        compute = self._computation(tokens, 1, trained=False)
        gathers = self._gathers(count, trained=False)
        traffic = self._gather(gathers) + self._copied(gathers, 0)
        return self._overlapped(compute, traffic) + self._joined(tokens, 1)

    def optimizer_step(self, tokens: float) -> float:
        """Return the seconds of an optimizer step on `tokens` tokens."""
        role, count = self.role, self.workload.micro_batches(tokens)
        assert isinstance(role.spec.sharding, FSDPConfig)
        again = RECOMPUTED[role.spec.sharding.activation_checkpointing]
        passes = 2 + again + role.model.trained / role.model.total
        compute = self._computation(tokens, passes, trained=True)
        gathers = self._gathers(count, trained=True)
        reduced = count if role.spec.sharding.reduce_gradients == "micro_batch" else 1
        traffic = self._gather(gathers) + reduced * self._reduce() + self._copied(gathers, reduced)
        states = role.model.shard(role.shards, trained=True) * OPTIMIZER_BYTES
        optimizer = states / (REACHED_BANDWIDTH * self.cluster.device.bandwidth)
        if self.host is not None:
            traffic += self.host.reduce()
            optimizer = (reduced - 1) * self.host.add() + self.host.optimizer_step()
        return self._overlapped(compute, traffic) + self._joined(tokens, 2 + again) + optimizer

    def _overlapped(self, compute: float, traffic: float) -> float:
        return compute + traffic if self.cluster.device.is_cpu else max(compute, traffic)

    def _gather(self, times: int) -> float:
        """Return the seconds in which FSDP2 gathers all weights."""
        n = self.role.shards
        size = self.role.itemsize * self.role.model.numel() * (n - 1) / n
        from_host = 0.0 if self.host is None else self.host.gather()
        return times * (size / self.ring + self._latency(n) + from_host)

    def _reduce(self) -> float:
        n, copies = self.role.shards, self.sizes["dp_replicate"]
        reduced = 2 if self.role.fsdp.reduce_dtype == "bfloat16" else 4
        size = reduced * self.role.model.numel(trained=True)
        seconds = size * (n - 1) / n / self.ring + self._latency(n)
        if copies > 1:
            between = self.cluster.bandwidth_between(copies, n * self.stride) * REACHED_BANDWIDTH
            seconds += 2 * size / n * (copies - 1) / copies / between + self._latency(copies)
        return seconds

    def _latency(self, ranks: int) -> float:
        blocks = self.role.model.blocks + 1
        return blocks * LATENCY_S[self.cluster.device.kind] * math.log2(max(ranks, 1))

    def _joined(self, tokens: float, passes: float) -> float:
        """Return the seconds of the exchange inside blocks: sums along `tp`, tokens for heads along `cp`."""
        text, w = self.role.model.config.get_text_config(), self.workload
        row = tokens / w.dp / w.cp * text.hidden_size * self.role.itemsize
        seconds = 0.0
        sums, exchanges = (self.sizes["tp"], 2 * 2.0, 1, True), (self.sizes["cp"], 4.0, self.sizes["tp"], False)
        for size, factor, stride, ring in (sums, exchanges):
            if size > 1:
                link = self.cluster.bandwidth_between(size, stride, ring) * REACHED_BANDWIDTH
                traffic = factor * row * (size - 1) / size / link
                seconds += passes * text.num_hidden_layers * traffic
        return seconds


def tokens_per_row(workload: Workload) -> float:
    """Return the tokens that are computed for a sequence, on average."""
    return workload.computed_tokens / workload.rows


def rollout_seconds(
    cfg: Config, cluster: Cluster, policy: ModelShape, engine: PlannedEngine, workload: Workload
) -> float:
    """Return the seconds in which the engines generate the completions of a step.

    Dynamic sampling generates further batches, and ReMax a greedy completion of each prompt: one batch after another.
    """
    w = workload
    seconds = cfg.plan.gen_batches * _batch_seconds(cfg, cluster, policy, engine, w, w.rows)
    if "baselines" in cfg.algorithm.reads:
        seconds += _batch_seconds(cfg, cluster, policy, engine, w, w.groups)
    return seconds


def _batch_seconds(
    cfg: Config, cluster: Cluster, policy: ModelShape, engine: PlannedEngine, workload: Workload, completions: int
) -> float:
    """Return the seconds in which the engines generate a batch of completions of all prompts.

    A decoding step reads the weights, without experts that none of its tokens passes through, and the keys and values
    of all sequences. It lasts as long as that or as its products, whichever takes longer; with several GPUs, they also
    add up their results. There are at least as many as the longest completion may have tokens.
    """
    device, w = cluster.device, workload
    gpus = max(1, engine.gpus)
    text = policy.config.get_text_config()
    rows = math.ceil(completions / cfg.num_engines)
    context = w.prompt + w.response / 2
    together = max(1.0, min(rows, cfg.rollout.max_num_seqs, engine.sequences(context)))
    steps = max(rows * w.response / together, float(w.longest_response))
    if not cfg.engine.streaming:  # the next requests wait for the longest completion of those before
        steps = max(steps, math.ceil(rows / together) * float(w.longest_response))
    running = rows * w.response / steps  # sequences in a step, on average
    bandwidth = REACHED_BANDWIDTH * device.bandwidth
    is_float32 = engine.weights * gpus >= 4 * policy.total
    speed = device.reached(torch.float32 if is_float32 else torch.bfloat16)
    if cfg.engine.streaming and device.flops_packed:
        packed = max(min(device.reached(torch.float32), device.flops_packed), REACHED_PACKED * device.flops_packed)
        speed = packed if is_float32 else min(speed, packed / PACKED_BFLOAT16)
    computed = policy.total - policy.idle() - (0 if text.tie_word_embeddings else text.vocab_size * text.hidden_size)
    weights = engine.weights * (1 - policy.idle(running) / policy.total)
    read = (weights + running * engine.cache.size(context)) / bandwidth
    products = 2 * computed * running / gpus / speed
    packs = device.is_cpu and not cfg.engine.streaming
    passes = PACKS_AGAIN * read + products if packs else max(read, products)
    beside = decode_step(device.kind, cfg.engine.streaming)
    fixed = device.slowness * (beside.base + beside.block * policy.blocks)
    fixed += _sum_seconds(cluster, policy, gpus, running)
    each = device.slowness * beside.sequence
    each += (beside.logit + beside.logit_bytes / bandwidth) * text.vocab_size
    prompts = math.ceil(rows * w.groups / completions) * w.prompt
    prefill = 2 * computed * prompts / gpus / speed + _sum_seconds(cluster, policy, gpus, prompts)
    crowd = max(1.0, cfg.num_engines / cluster.per_node) if device.is_cpu else 1.0
    requests = rows * device.slowness * beside.request
    seconds = steps * (passes + fixed + each * running) + prefill + requests
    return crowd * seconds + device.is_cpu * completions * CPU_COMPLETION_S


def _sum_seconds(cluster: Cluster, policy: ModelShape, gpus: int, tokens: float) -> float:
    """Return the seconds in which the GPUs of an engine add up their results for some tokens, twice in each block."""
    if gpus == 1:
        return 0.0
    size = 2 * tokens * policy.config.get_text_config().hidden_size
    traffic = 2 * size * (gpus - 1) / gpus / (REACHED_BANDWIDTH * cluster.device.link)
    return 2 * policy.blocks * (traffic + LATENCY_S["cuda"])


def sync_seconds(
    cfg: Config, cluster: Cluster, policy: ModelShape, engine: PlannedEngine, roles: Sequence[PlannedRole]
) -> float:
    """Return the seconds in which the weights go from the ranks to the engines.

    The ranks gather one tensor after the other; on the way the slower of the gather and the sending counts.
    """
    device = cluster.device
    if cfg.syncs_adapter:
        return _adapter_seconds(cfg, cluster, policy)
    size = engine.weights * max(1, engine.gpus)
    tensors = len(policy.parameters)
    if device.is_cpu:
        return SYNC_BYTES * size / device.bandwidth + tensors * LATENCY_S["cpu"] + SYNC_S
    gather = size / (cluster.bandwidth_between(cfg.trainer.num_workers) * REACHED_BANDWIDTH)
    if cfg.rollout.colocate:
        send = size / (REACHED_BANDWIDTH * device.bandwidth)
    else:
        receivers = cfg.num_engines * max(1, engine.gpus)
        send = size / (cluster.bandwidth_between(cfg.trainer.num_workers + receivers) * REACHED_BANDWIDTH)
    host = next((offloaded(role, device) for role in roles if role.spec.name == "policy"), None)
    from_host = 0.0 if host is None else host.send(size / policy.total)
    return from_host + gather + send + tensors * LATENCY_S["cuda"] * math.log2(max(2, cfg.trainer.num_workers))


def _adapter_seconds(cfg: Config, cluster: Cluster, policy: ModelShape) -> float:
    """Return the seconds in which the adapters, in float32, go from the ranks to the engines in one piece.

    Rank 0 gathers them and copies them to its host. There they become a file, go through the driver to each node, and
    each engine writes them to shared memory, reads them and copies them to its GPU.
    """
    device, size = cluster.device, 4 * policy.trained
    tensors = sum(parameter.trained for parameter in policy.parameters)
    if device.is_cpu:
        return ADAPTER_COPIES * 2 * size / device.bandwidth + tensors * LATENCY_S["cpu"]
    gather = size / (cluster.bandwidth_between(cfg.trainer.num_workers) * REACHED_BANDWIDTH)
    on_hosts = ADAPTER_COPIES * 2 * size / (REACHED_BANDWIDTH * device.host_bandwidth)
    to_nodes = (cluster.nodes - 1) * size / (REACHED_BANDWIDTH * device.network)
    latency = tensors * LATENCY_S["cuda"] * math.log2(max(2, cfg.trainer.num_workers))
    return gather + 2 * size / device.pcie + on_hosts + to_nodes + latency
