"""The memory of an inference engine on each of its devices: weights, KV cache, workspaces."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from trainer.config import Config
from trainer.plan.hardware import CONTEXT_BYTES, GRAPHS_BYTES, Cluster, Device, prefill_tokens
from trainer.plan.kv_cache import SequenceCache, cache_of, expanded_bytes
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
    cache: SequenceCache
    """Of each sequence, in the KV cache."""
    longest: int
    """Tokens of the longest sequence."""
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
        """Tokens of the longest sequences that fit into the KV cache."""
        return int(self.sequences(self.longest) * self.longest)

    @property
    def bytes_per_token(self) -> float:
        """Bytes that a token of the longest sequences takes in the KV cache."""
        return self.cache.size(self.longest) / self.longest

    def sequences(self, tokens: float) -> float:
        """Return how many sequences of so many tokens it can have at a time."""
        return max(0, self.kv_cache) / self.cache.size(tokens)


def plan_engine(cfg: Config, policy: ModelShape, device: Device, workload: Workload) -> PlannedEngine | None:
    """Return what an engine takes; None: the run has none.

    vLLM sets aside its share of a GPU, or on CPU the cache of the config. An engine that takes no requests while it
    generates, as that of transformers, holds the keys and values of the rows that run together, at most as long as the
    longest sequence.

    Args:
        policy: the complete model, without tensor parallelism.

    Raises:
        UserError: the config of the model does not say what its layers keep of a sequence.
    """
    if not cfg.num_engines or not cfg.engine.gpus and not device.is_cpu:
        return None
    r = cfg.rollout
    tp = r.tensor_parallel_size if not device.is_cpu else 1
    itemsize = 2 if r.dtype == "bfloat16" or r.dtype == "auto" and not device.is_cpu else 4
    text = policy.config.get_text_config()
    cache, longest = cache_of(cfg, policy, itemsize, tp), workload.longest
    weights = itemsize * policy.total // tp
    batch = max(_prefill_tokens(cfg, device), cfg.longest_sequence if device.is_cpu else 0, r.max_num_seqs)
    layer = itemsize * batch * numbers_of_layer(text, tp, device.is_cpu)
    sampler = itemsize * batch * text.hidden_size + r.max_num_seqs * text.vocab_size * _bytes_of_logit(
        device, itemsize, tp
    )
    workspace = int(max(layer, sampler))
    if not cfg.engine.streaming:
        rows = min(math.ceil(workload.rows / cfg.num_engines), r.max_num_seqs)
        widths = getattr(text, "intermediate_size", 0) + text.hidden_size  # transformers holds three tensors of each
        prompts = rows * (itemsize * r.max_prompt_tokens * 3 * widths + cache.size(r.max_prompt_tokens))
        size = rows * cache.size(longest)
        expanded = rows * longest * expanded_bytes(text, itemsize)
        workspace = max(prompts - size, _NOISE_BYTES * rows * text.vocab_size) + expanded
    elif device.is_cpu:
        size = r.kv_cache_mb * 2**20
    else:
        budget = int(r.gpu_memory_utilization * device.memory)
        graphs = 0 if r.enforce_eager else GRAPHS_BYTES
        size = budget - weights - workspace - graphs - CONTEXT_BYTES
        return PlannedEngine(weights, size, workspace + graphs, cache, longest, budget, tp, graphs)
    gpus = 0 if device.is_cpu else tp
    return PlannedEngine(weights, size, workspace, cache, longest, weights + size + workspace, gpus)


def numbers_of_layer(text: Any, tp: int, on_cpu: bool) -> int:
    """Return how many numbers vLLM holds for each token of a prefill at the fullest moment of a layer.

    Around the layer are its input and the residuals. Attention holds queries, keys and values, copies of the first two
    with their norms, and its result. The feed-forward part holds two products beside each other (SwiGLU), their product
    and its result; experts hold two buffers for each expert of a token. On CPU there is one tensor more in each part,
    because norms and SwiGLU are not fused. Measured there: within 1 %.
    """
    hidden, heads = text.hidden_size, text.num_attention_heads
    width = getattr(text, "head_dim", None) or hidden // heads
    keys = getattr(text, "num_key_value_heads", None) or heads
    attention = 3 * width * (heads + max(keys, tp)) // tp + (5 if on_cpu else 3) * hidden
    inner = getattr(text, "intermediate_size", None) or 4 * hidden
    feed_forward = (4 if on_cpu else 3) * inner // tp
    if chosen := getattr(text, "num_experts_per_tok", None):
        inner = (getattr(text, "moe_intermediate_size", None) or inner) // tp
        feed_forward = chosen * (max(inner, hidden) + max(2 * inner, hidden))
    return max(attention, feed_forward + 4 * hidden)


def _bytes_of_logit(device: Device, itemsize: int, tp: int) -> float:
    """Return the bytes that vLLM's sampler takes for each sequence and token of the vocabulary.

    On GPUs these are the logits, and a copy in float32 if anything changes them; with several GPUs also each one's
    part, and what they have gathered before it is put in order. On CPU there are three tensors in float32.
    """
    if device.is_cpu:
        return 3 * 4
    return 4 + itemsize * (1 if tp == 1 else 2 + 1 / tp)


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
        each = "each needs a GPU" if size == 1 else f"each needs {size} GPUs of one node"
        return (
            f"rollout.num_engines={cfg.num_engines}: {each}, and with {cluster.per_node} GPUs a node there are {gpus} "
            f"for {most}"
        )
    heads = policy.config.get_text_config().num_attention_heads
    if engine.gpus and heads % engine.gpus:  # vLLM refuses it
        return f"rollout.tensor_parallel_size={engine.gpus} must divide the number of attention heads, {heads}"
    if cfg.engine.streaming and cluster.device.is_cpu and engine.cache.states:
        return "vLLM cannot generate on CPU with layers that keep a state; choose rollout=transformers"
    if engine.kv_cache <= 0:
        return "the weights leave no room for a KV cache"
    needed = engine.cache.size(workload.longest, in_flight=_prefill_tokens(cfg, cluster.device))
    if cfg.engine.streaming and needed > engine.kv_cache:  # vLLM refuses to start
        return (
            f"its KV cache has {engine.kv_cache / 2**20:,.0f} MiB, and the longest sequence has {workload.longest:,} "
            f"tokens, which may take {needed / 2**20:,.0f} MiB"
        )
    return None
