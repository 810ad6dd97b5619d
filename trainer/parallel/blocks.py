"""What is done to the blocks of a model before they are sharded: activation checkpointing."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from trainer.config import FSDPConfig

_EXPENSIVE = {
    f"{namespace}::{name}"
    for namespace, names in {
        "aten": (
            "mm",
            "addmm",
            "_grouped_mm",
            "_scaled_mm",
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_cudnn_attention",
            "_scaled_dot_product_fused_attention_overrideable",
        ),
        "torch_attn": ("_varlen_attn",),
    }.items()
    for name in names
}
"""Operators whose outputs `selective` keeps: matrix products and fused attention. A batched product (`bmm`) is not
among them, because in attention that is not fused its output has the size of the squared length."""


def prepare_blocks(blocks: Sequence[nn.Module], config: FSDPConfig) -> None:
    """Replace the `forward` of each block, in place. Call it before `fully_shard`, whose hooks stay outside of it."""
    for block in blocks:
        block.forward = _recomputed(block.forward, config.activation_checkpointing)


def _recomputed(forward: Callable[..., Any], mode: str) -> Callable[..., Any]:
    """Return `forward`, which keeps the activations that `FSDPConfig.activation_checkpointing` says."""
    if mode == "none":
        return forward
    options: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
    return functools.partial(checkpoint, forward, **options)


def _policy(_: Any, operator: torch._ops.OpOverload, *__: Any, **___: Any) -> CheckpointPolicy:
    saved = operator.name().partition(".")[0] in _EXPENSIVE
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE
