"""Packed attention as one operator that `torch.compile` does not trace.

Its cost depends on the lengths of the sequences, which differ in each micro-batch. A graph of its content would have to
be compiled again and again.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey

from trainer.models.sdpa_attention import attend_buckets
from trainer.parallel.packing import Packing


@torch.library.custom_op("trainer::packed_attention", mutates_args=())
def attention_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sizes: Tensor,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    has_sinks: bool = False,
) -> Tensor:
    """Compute `attend_buckets` for sequences of these sizes (see `Packing.sizes`)."""
    return attend_buckets(query, key, value, _packing(sizes, query), scaling, window, softcap, has_sinks).contiguous()


@attention_op.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])


@torch.library.custom_op("trainer::packed_attention_backward", mutates_args=())
def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sizes: Tensor,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    has_sinks: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    inputs = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
    with torch.enable_grad(), _recording():
        out = attend_buckets(*inputs, _packing(sizes, query), scaling, window, softcap, has_sinks)
    dq, dk, dv = torch.autograd.grad(out, inputs, grad)
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


@_backward.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.options = inputs[4:]


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return (*_backward(grad, *ctx.saved_tensors, *ctx.options), None, None, None, None, None)


attention_op.register_autograd(_differentiate, setup_context=_save)


def _recording() -> AbstractContextManager[None]:
    """Let autograd record in the block. Inside an operator it does not record by default."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (DispatchKey.AutogradFunctionality, DispatchKey.AutogradOther, DispatchKey.ADInplaceOrView):
        excluded = excluded.remove(key)  # only these keys: those of autocast must stay excluded
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


def _packing(sizes: Tensor, query: Tensor) -> Packing:
    lengths, prefix_lengths = sizes.tolist()
    return _cached_packing(tuple(lengths), tuple(prefix_lengths), query.device)


@functools.lru_cache(maxsize=4)  # all layers of a micro-batch use the same packing
def _cached_packing(lengths: tuple[int, ...], prefix_lengths: tuple[int, ...], device: torch.device) -> Packing:
    return Packing(lengths, device, prefix_lengths=prefix_lengths)
