"""The memory of an inference engine on each of its devices: weights, KV cache, workspaces."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

from trainer.config import Config
from trainer.config.rollout import CPU_CACHE_BYTES
from trainer.errors import UserError
from trainer.plan.hardware import CONTEXT_BYTES, GRAPHS_BYTES, Cluster, Device, prefill_tokens
from trainer.plan.model_shape import ModelShape
from trainer.plan.workload import Workload

_NOISE_BYTES = 5 * 4
"""Of each row and token of the vocabulary while transformers draws a token: logits, log-probs, noise, their sum and the
scores that choose the token (`KeyedSampler`)."""
_LATENT_TYPES = {"deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2"}
"""Types of models whose latent attention vLLM stores compressed."""


@dataclass(frozen=True)
class SequenceCache:
    """What an engine keeps of a sequence on each of its devices, in bytes."""

    token: int
    """Of each token, in the layers that attend to all tokens."""
    window: int = 0
    """Tokens to which the other layers attend."""
    window_token: int = 0
    """Of each token in the window, in these layers."""
    states: int = 0
    """Of the layers that keep a state."""

    def size(self, tokens: float) -> int:
        """Return the bytes of a sequence of so many tokens."""
        return int(tokens * self.token + min(tokens, self.window) * self.window_token + self.states)


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
    gpus: int
    """Of an engine. 0: it has none of the job."""
    graphs: int = 0
    """Of `workspace`, what the engine keeps while it sleeps."""

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

    Raises:
        UserError: the config of the model does not say what its layers keep of a sequence.
    """
    if not cfg.num_engines or not cfg.engine.gpus and not device.is_cpu:
        return None
    r, text, longest = cfg.rollout, policy.text, workload.longest
    tp = r.tensor_parallel_size if not device.is_cpu else 1
    itemsize = 2 if r.dtype == "bfloat16" or r.dtype == "auto" and not device.is_cpu else 4
    cache, weights = cache_of(cfg, policy, itemsize, tp), itemsize * policy.total // tp
    gpus = 0 if device.is_cpu else tp
    if not cfg.engine.streaming:
        rows = min(math.ceil(workload.rows / cfg.num_engines), r.max_num_seqs)
        widths = getattr(text, "intermediate_size", 0) + text.hidden_size  # transformers holds three tensors of each
        prompts = rows * (itemsize * r.max_prompt_tokens * 3 * widths + cache.size(r.max_prompt_tokens))
        size = rows * cache.size(longest)
        workspace = max(prompts - size, _NOISE_BYTES * rows * text.vocab_size)
        return PlannedEngine(weights, size, workspace, cache, longest, gpus)
    prefill = r.engine_args.get("max_num_batched_tokens") or prefill_tokens(device)
    batch = max(prefill, cfg.longest_sequence if device.is_cpu else 0, r.max_num_seqs)
    # The sampler holds the logits, and a copy in float32; with several GPUs also a part, and what is gathered of them.
    logit = 4 + itemsize * (1 if tp == 1 else 3)
    sampler = itemsize * batch * text.hidden_size + r.max_num_seqs * text.vocab_size * logit
    workspace = max(itemsize * batch * numbers_of_layer(text, tp), sampler)
    if device.is_cpu:
        size = r.engine_args.get("kv_cache_memory_bytes") or CPU_CACHE_BYTES
        return PlannedEngine(weights, size, workspace, cache, longest, gpus)
    graphs = 0 if r.engine_args.get("enforce_eager") else GRAPHS_BYTES
    size = int(r.gpu_memory_utilization * device.memory) - weights - workspace - graphs - CONTEXT_BYTES
    return PlannedEngine(weights, size, workspace + graphs, cache, longest, gpus, graphs)


def numbers_of_layer(text: Any, tp: int) -> int:
    """Return how many numbers vLLM holds for each token of a prefill at the fullest moment of a layer.

    Around the layer are its input and the residuals. Attention holds queries, keys and values, copies of the first two
    with their norms, and its result. The feed-forward part holds two products beside each other (SwiGLU), their product
    and its result; experts hold two buffers for each expert of a token. On CPU there is one tensor more in each part.
    """
    hidden, heads = text.hidden_size, text.num_attention_heads
    width = getattr(text, "head_dim", None) or hidden // heads
    keys = getattr(text, "num_key_value_heads", None) or heads
    attention = 3 * width * (heads + max(keys, tp)) // tp + 3 * hidden
    inner = getattr(text, "intermediate_size", None) or 4 * hidden
    feed_forward = 3 * inner // tp
    if chosen := getattr(text, "num_experts_per_tok", None):
        inner = (getattr(text, "moe_intermediate_size", None) or inner) // tp
        feed_forward = chosen * (max(inner, hidden) + max(2 * inner, hidden))
    return max(attention, feed_forward + 4 * hidden)


def engine_problem(
    cfg: Config, cluster: Cluster, engine: PlannedEngine, workload: Workload, policy: ModelShape
) -> str | None:
    """Return why the engines cannot work with their GPUs and the memory of these; None: they can."""
    size, heads = engine.gpus, policy.text.num_attention_heads
    if size > cluster.per_node:
        key = f"rollout.tensor_parallel_size={size}"
        return f"{key}: the GPUs of an engine are on one node, and a node has {cluster.per_node}"
    if size:  # ranks fill one node after the other, and engines share their GPUs
        nodes, rest = divmod(cfg.trainer.num_workers if cfg.rollout.colocate else cluster.gpus, cluster.per_node)
        most = nodes * (cluster.per_node // size) + rest // size
        if cfg.num_engines > most:
            return f"rollout.num_engines={cfg.num_engines}: there is room for {most} engines of {size} GPUs of one node"
        if heads % size:  # vLLM refuses it
            return f"rollout.tensor_parallel_size={size} must divide the number of attention heads, {heads}"
    if cfg.engine.streaming and cluster.device.is_cpu and engine.cache.states:
        return "vLLM cannot generate on CPU with layers that keep a state; choose rollout=transformers"
    if engine.kv_cache <= 0:
        return "the weights leave no room for a KV cache"
    needed = engine.cache.size(workload.longest)
    if cfg.engine.streaming and needed > engine.kv_cache:  # vLLM refuses to start
        return (
            f"its KV cache has {engine.kv_cache / 2**20:,.0f} MiB, and the longest sequence has {workload.longest:,} "
            f"tokens, which take {needed / 2**20:,.0f} MiB"
        )
    return None


def cache_of(cfg: Config, model: ModelShape, itemsize: int, tp: int) -> SequenceCache:
    """Return what vLLM keeps of a sequence on one of `tp` devices. transformers keeps as much, or a little less.

    Raises:
        UserError: the config of the model does not say what its layers keep.
    """
    text, role = model.text, cfg.roles[0]
    windowed = "sliding_attention" if getattr(text, "sliding_window", None) else "full_attention"
    kinds = Counter(getattr(text, "layer_types", None) or [windowed] * text.num_hidden_layers)
    full, window, state = (kinds.pop(f"{kind}_attention", 0) for kind in ("full", "sliding", "linear"))
    shares = getattr(text, "num_kv_shared_layers", 0) or text.to_dict().get("per_layer_config")
    is_unknown = kinds or shares or bool(state) != model.is_stateful
    is_unknown = is_unknown or state and not hasattr(text, "linear_num_value_heads")
    rank = getattr(text, "kv_lora_rank", None)
    if is_unknown or rank and text.model_type not in _LATENT_TYPES:
        raise UserError(
            f"{role.path_key}={role.path or cfg.model.path}: engines for models of the type {model.config.model_type} "
            "cannot be planned, because it is not known what their layers keep of a sequence; choose another model, or "
            "plan trainer.task=sft"
        )
    if rank:
        return SequenceCache(full * (rank + text.qk_rope_head_dim) * itemsize)  # on each device
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    if getattr(text, "multi_query", False) and not getattr(text, "new_decoder_architecture", False):
        heads = 1
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    token, states = 2 * max(1, heads // tp) * width * itemsize, 0
    if state:  # a gated delta net (Yang et al., 2024): a matrix for each head, and the last inputs of a convolution
        keys, values = text.linear_num_key_heads // tp, text.linear_num_value_heads // tp
        key, value = text.linear_key_head_dim, text.linear_value_head_dim
        inputs = (text.linear_conv_kernel_dim - 1) * (2 * keys * key + values * value) * itemsize
        states = state * (inputs + values * value * key * 4)
    return SequenceCache(full * token, text.sliding_window if window else 0, window * token, states)
