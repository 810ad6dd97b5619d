"""The FLOPs of attention, by the kinds of a model's layers."""

from __future__ import annotations

from typing import Any

import torch

from trainer.config import Config
from trainer.models.attention import PACKABLE_LAYERS, uses_varlen
from trainer.plan.kv_cache import STATE, WINDOW, layer_types
from trainer.plan.workload import Workload

_DELTA_CHUNK = 64
"""Tokens of a chunk in the kernels of gated delta nets (transformers and flash-linear-attention)."""


def attention_flops(cfg: Config, text: Any, dtype: torch.dtype, device: str, workload: Workload, tp: int) -> float:
    """Return the FLOPs of a forward pass in the attention of all layers, for a row of mean length.

    Args:
        text: the config of the language model.
        dtype: of the passes.
        device: `cpu` or `cuda`.
        tp: ranks that have a part of the heads each.
    """
    w, length = workload, workload.prompt + workload.response
    shared = (w.n - 1) / w.n if w.shares_prompts else 0.0
    width = text.num_attention_heads // tp * head_width(text)

    def of_layer(kind: str) -> float:
        if kind == STATE and hasattr(text, "linear_num_value_heads"):
            return length * _delta_flops(text) / tp
        span = _span(cfg, text, kind, dtype, device)
        pairs = [_pairs(tokens, span) for tokens in (length, w.prompt)]
        return 4 * width * (pairs[0] - shared * pairs[1])

    layers = layer_types(text)
    flops = {kind: of_layer(kind) for kind in {*layers}}
    return sum(flops[kind] for kind in layers)


def head_width(text: Any) -> float:
    """Return the dimensions of a head: with latent attention, the mean of its keys and its values."""
    if getattr(text, "kv_lora_rank", None):
        return (text.qk_nope_head_dim + text.qk_rope_head_dim + text.v_head_dim) / 2
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


def _pairs(length: int, span: int | None) -> float:
    """Return how many pairs of tokens attention computes in a sequence, half of the diagonal among them.

    Args:
        span: most tokens that a token attends to. None: all before it.
    """
    if span is None or span >= length:
        return length**2 / 2
    return span**2 / 2 + (length - span) * span


def _span(cfg: Config, text: Any, kind: str, dtype: torch.dtype, device: str) -> int | None:
    """Return how many tokens a token attends to, if the kernel computes no others; None: all before it.

    Models with other kinds of layers cannot pack rows. They have the masks of transformers, behind which all pairs are
    computed.
    """
    softcap = getattr(text, "attn_logit_softcapping", None)
    packs = cfg.trainer.pack and cfg.model.attn_implementation == "sdpa" and set(layer_types(text)) <= PACKABLE_LAYERS
    if kind != WINDOW or not packs or not uses_varlen(device, dtype, int(head_width(text)), softcap):
        return None
    return text.sliding_window


def _delta_flops(text: Any) -> float:
    """Return the FLOPs of a gated delta net (Yang et al., 2024) for a token, by the products of its chunks.

    Inside a chunk: keys with keys, queries with keys, these with values, and two triangular systems. Between chunks:
    keys and queries with the state, and the update of the state.
    """
    key, value = text.linear_key_head_dim, text.linear_value_head_dim
    inside = _DELTA_CHUNK * (2 * key + 2 * key + 2 * value + key + value)
    return text.linear_num_value_heads * (inside + 3 * 2 * key * value)
