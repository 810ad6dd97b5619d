"""What is done to the blocks of a model before they are sharded: activation checkpointing and compilation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from trainer.config import FSDPConfig
from trainer.parallel.layout import Layout

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
        "trainer": ("packed_attention",),
    }.items()
    for name in names
}
"""Operators whose outputs `selective` keeps: matrix products and fused attention. A batched product (`bmm`) is not
among them, because in attention that is not fused its output has the size of the squared length."""


_GRAPHS = 64
"""Most graphs that torch compiles of one function."""


def prepare_blocks(blocks: Sequence[nn.Module], config: FSDPConfig, layout: Layout) -> None:
    """Replace the `forward` of each block, in place, as the config says.

    Call it before `fully_shard`, whose hooks stay outside of the new `forward`. Names in the state do not change.
    """
    compiled = compiles_blocks(config, layout.device, layout.sizes)
    if compiled:
        # Graphs differ by role, by whether gradients are computed, and by kind of layer. Beyond the limit, torch would
        # stop compiling without an error.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _GRAPHS)
    for block in blocks:
        forward = _recomputed(block.forward, config.activation_checkpointing)
        block.forward = torch.compile(forward, dynamic=True) if compiled else forward


def compiles_blocks(config: FSDPConfig, device: str, sizes: Mapping[str, int]) -> bool:
    """Return whether blocks on `device` (`cpu` or `cuda`) are compiled.

    Args:
        sizes: of the axes of the layout. Ranks that share a micro-batch communicate inside of a block.
    """
    if config.compile is None:
        return device == "cuda" and sizes["context"] == sizes["tensor"] == 1
    return config.compile


def _recomputed(forward: Callable[..., Any], mode: str) -> Callable[..., Any]:
    """Return `forward`, which keeps the activations that `FSDPConfig.activation_checkpointing` says."""
    if mode == "none":
        return forward
    options: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, **options, **kwargs)

    return recomputed


def _policy(_: Any, operator: torch._ops.OpOverload, *__: Any, **___: Any) -> CheckpointPolicy:
    saved = operator.name().partition(".")[0] in _EXPENSIVE
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE
