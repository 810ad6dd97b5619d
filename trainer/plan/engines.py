"""The memory of an inference engine on each of its devices: weights, KV cache, workspaces."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainer.config import Config
from trainer.plan.hardware import CONTEXT_BYTES, GRAPHS_BYTES, Cluster, Device, prefill_tokens
from trainer.plan.model_shape import ModelShape
from trainer.plan.workload import Workload

_NOISE_BYTES = 5 * 4
"""Of each row and token of the vocabulary while transformers draws a token: logits, log-probs, noise, their sum and the
scores that choose the token (`KeyedSampler`)."""


@dataclass(frozen=True)
class PlannedEngine:
    """Bytes of one engine on each of its devices."""

    weights: int
    kv_cache: int
    workspace: int
    kv_token: int
    """Bytes of the keys and values of a token."""
    budget: int
    """What the engine may take of a GPU. If it takes no share of one, and on CPU: what it takes."""
    gpus: int
    """Of an engine. 0: it has none of the job."""
    graphs: int = 0
    """Of `workspace`, what the engine keeps while it sleeps."""

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache + self.workspace

    @property
    def waking(self) -> int:
        """What a sleeping engine takes when it wakes up."""
        return self.weights + self.kv_cache

    @property
    def tokens(self) -> int:
        """Tokens whose keys and values fit into the cache."""
        return max(0, self.kv_cache // self.kv_token)

    def sequences(self, tokens: float) -> float:
        """Return how many sequences of so many tokens it can have at a time."""
        return self.tokens / tokens


def kv_bytes(model: ModelShape, itemsize: int, tp: int) -> int:
    """Return the bytes of the keys and values of a token on one of `tp` devices."""
    text = model.config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2 * text.num_hidden_layers * max(1, heads // tp) * width * itemsize


def plan_engine(cfg: Config, policy: ModelShape, device: Device, workload: Workload) -> PlannedEngine | None:
    """Return what an engine takes; None: the run has none.

    vLLM sets aside its share of a GPU. An engine that takes no requests while it generates, as that of transformers,
    holds the keys and values of the rows that run together, at most as long as the longest sequence.

    Args:
        policy: the complete model, without tensor parallelism.
    """
    if not cfg.num_engines or not cfg.engine.gpus and not device.is_cpu:
        return None
    r = cfg.rollout
    tp = r.tensor_parallel_size if not device.is_cpu else 1
    itemsize = 2 if r.dtype == "bfloat16" or r.dtype == "auto" and not device.is_cpu else 4
    text = policy.config.get_text_config()
    token = kv_bytes(policy, itemsize, tp)
    weights = itemsize * policy.total // tp
    batch = max(_prefill_tokens(cfg, device), cfg.longest_sequence if device.is_cpu else 0, r.max_num_seqs)
    layer = max(getattr(text, "intermediate_size", 0) // tp * 2, 4 * text.hidden_size)
    workspace = itemsize * batch * (layer + 2 * text.hidden_size) + 3 * 4 * r.max_num_seqs * text.vocab_size // tp
    if not device.is_cpu and not cfg.engine.streaming:
        rows = min(math.ceil(workload.rows / cfg.num_engines), r.max_num_seqs)
        prompts = itemsize * rows * r.max_prompt_tokens * (layer + 2 * text.hidden_size)
        cache, workspace = rows * workload.longest * token, max(prompts, _NOISE_BYTES * rows * text.vocab_size)
        return PlannedEngine(weights, cache, workspace, token, weights + cache + workspace, tp)
    if device.is_cpu:
        cache = r.kv_cache_mb * 2**20
        return PlannedEngine(weights, cache, workspace, token, weights + cache + workspace, 0)
    budget = int(r.gpu_memory_utilization * device.memory)
    graphs = 0 if r.enforce_eager else GRAPHS_BYTES
    cache = budget - weights - workspace - graphs - CONTEXT_BYTES
    return PlannedEngine(weights, cache, workspace + graphs, token, budget, tp, graphs)


def _prefill_tokens(cfg: Config, device: Device) -> int:
    return cfg.rollout.engine_args.get("max_num_batched_tokens") or prefill_tokens(device)


def most_engines(cluster: Cluster, size: int, ranks: int | None) -> int:
    """Return how many engines the cluster has room for: all GPUs of an engine are on one node.

    Args:
        size: GPUs of an engine.
        ranks: that share their GPUs with engines; they fill one node after the other. None: engines have their own
            GPUs, and are placed first.
    """
    if ranks is None:
        return cluster.nodes * (cluster.per_node // size)
    nodes, left = divmod(ranks, cluster.per_node)
    return nodes * (cluster.per_node // size) + left // size


def engine_problem(
    cfg: Config, cluster: Cluster, engine: PlannedEngine, workload: Workload, policy: ModelShape
) -> str | None:
    """Return why the engines cannot work with their GPUs and the memory of these; None: they can.

    Args:
        policy: the complete model, without tensor parallelism.
    """
    size = engine.gpus
    if size > cluster.per_node:
        key = f"rollout.tensor_parallel_size={size}"
        return f"{key}: the GPUs of an engine are on one node, and a node has {cluster.per_node}"
    shared = cfg.rollout.colocate
    most = most_engines(cluster, size, cfg.trainer.num_workers if shared else None) if size else cfg.num_engines
    if cfg.num_engines > most:
        gpus = "GPUs that ranks have" if shared else "GPUs"
        return (
            f"rollout.num_engines={cfg.num_engines}: the {size} GPUs of an engine are on one node, and with "
            f"{cluster.per_node} GPUs a node there are {gpus} for {most}"
        )
    heads = policy.config.get_text_config().num_attention_heads
    if engine.gpus and heads % engine.gpus:  # vLLM refuses it
        return f"rollout.tensor_parallel_size={engine.gpus} must divide the number of attention heads, {heads}"
    if engine.kv_cache <= 0:
        return "the weights leave no room for a KV cache"
    if engine.sequences(workload.longest) < 1:
        return f"its KV cache holds {engine.tokens:,} tokens, and the longest sequence has {workload.longest:,}"
    return None
