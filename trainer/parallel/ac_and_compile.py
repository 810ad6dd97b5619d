"""Activation checkpointing and compilation of the blocks of a model, before they are sharded."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from trainer.config import FSDPConfig
from trainer.parallel.axes import AXES

_EXPENSIVE = {
    *(f"aten::{name}" for name in ("mm", "addmm", "_grouped_mm", "_scaled_mm")),
    *(f"aten::_scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient", "cudnn")),
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_fused_attention_overrideable",
    "torch_attn::_varlen_attn",
    "trainer::packed_attention",
}
"""Operators whose outputs `selective` keeps: matrix products and fused attention. Batched products (`bmm`) are not
included: in attention without a fused kernel, the size of their output is quadratic in the length."""


_MAX_GRAPHS = 64  # largest number of graphs that torch compiles for one function


def prepare_blocks(blocks: Sequence[nn.Module], config: FSDPConfig, compiled: bool) -> None:
    """Replace the `forward` of each block, in place, as the config requires. `compiled`: see `compiles_blocks`. Call it
    before `fully_shard`, whose hooks stay outside the new `forward`. Names in the state dict do not change."""
    if compiled:
        allow_graphs()
    for block in blocks:
        forward = recomputed(block.forward, config.activation_checkpointing)
        block.forward = torch.compile(forward, dynamic=True) if compiled else forward


def allow_graphs() -> None:
    """Let torch compile enough graphs of a function in this thread. They differ by role, by whether gradients are
    computed, and by type of layer. Above the limit, torch would stop compiling without an error."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MAX_GRAPHS)


def compiles_blocks(config: FSDPConfig, device: str, sizes: Mapping[str, int], deterministic: bool) -> bool:
    """Return whether blocks on `device` (`cpu` or `cuda`) are compiled, with these sizes of the layout's axes."""
    if config.compile is not None:
        return config.compile
    # What a kernel is compiled to depends on the sizes that a process has met first, which a resume changes.
    alone = all(size == 1 for name, size in sizes.items() if AXES[name].joins_blocks)
    return device == "cuda" and alone and not deterministic


def recomputed(forward: Callable[..., Any], mode: str) -> Callable[..., Any]:
    if mode == "none":
        return forward
    options: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)

    def computed_again(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, **options, **kwargs)

    return computed_again


def _policy(_: Any, operator: torch._ops.OpOverload, *__: Any, **___: Any) -> CheckpointPolicy:
    saved = operator.name().partition(".")[0] in _EXPENSIVE
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE
