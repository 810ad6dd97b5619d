"""Attention of a packed row with SDPA: one call for each bucket of sequences of similar length.

Its cost depends on the lengths of the sequences, which differ in each micro-batch. So it is also one operator that
`torch.compile` does not trace: a graph of its content would have to be compiled again and again.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch.nn import functional as F

from trainer.parallel.packing import Bucket, Packing, index_select

_SINK_WIDTH = 8
"""Dimensions that sinks add to a head. Fused kernels need multiples of 8."""


def attend_buckets(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packing: Packing,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    has_sinks: bool = False,
) -> Tensor:
    """Compute causal attention within each sequence (see `packed_attention`): `(1, N, H, D)`.

    Args:
        has_sinks: each token also attends to a sink, whose score its query has (see `with_sink_scores`).
    """
    queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    buckets = packing.buckets
    if any(packing.prefix_lengths):
        keys, values = index_select(keys, packing.key_indices), index_select(values, packing.key_indices)
    outputs = [
        _attend_bucket(*tensors, bucket, indices, scaling, window, softcap, has_sinks)
        for *tensors, bucket, indices in zip(
            queries.split([bucket.tokens for bucket in buckets]),
            keys.split([bucket.keys for bucket in buckets]),
            values.split([bucket.keys for bucket in buckets]),
            buckets,
            packing.bucket_indices,
            strict=True,
        )
    ]
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs))[None]


def with_sink_scores(query: Tensor, key: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return queries `(1, H, N, D)` and keys of more dimensions, in the first of which each query has its head's score.

    A sink's key has a 1 in this dimension and all others a 0. So the fused kernels compute attention with sinks, and
    their gradients.

    Args:
        scores: `(H,)`, before the factor of the scores is applied.
    """
    column = scores.to(query.dtype)[None, :, None, None].expand(*query.shape[:3], 1)
    query = torch.cat([query, F.pad(column, (0, _SINK_WIDTH - 1))], dim=-1)
    return query, F.pad(key, (0, _SINK_WIDTH))


def _attend_bucket(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    bucket: Bucket,
    indices: tuple[Tensor, Tensor],
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    has_sinks: bool,
) -> Tensor:
    """Compute the attention of one bucket's tokens, `(tokens, H, D)`, to all tokens of their sequences."""
    rows, (query_indices, key_indices) = len(bucket.lengths), indices

    def padded(tensor: Tensor, indices: Tensor, longest: int) -> Tensor:
        """Turn tokens `(n, H, D)` into `(rows, H, longest, D)`."""
        even = tensor if bucket.is_even else _Scatter.apply(tensor, indices, rows * longest)
        return even.unflatten(0, (rows, longest)).transpose(1, 2)

    longest_keys = bucket.longest + bucket.prefix_length
    out = _attend(
        padded(queries, query_indices, bucket.longest),
        padded(keys, key_indices, longest_keys),
        padded(values, key_indices, longest_keys),
        scaling,
        window,
        softcap,
        has_sinks,
    )
    flat = out.transpose(1, 2).flatten(0, 1)
    return flat if bucket.is_even else _Gather.apply(flat, query_indices)


class _Scatter(torch.autograd.Function):
    """Copy row i to row `indices[i]` of `size` rows of zeros. No index repeats, so forward and backward only copy."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, indices: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(indices)
        return rows.new_zeros(size, *rows.shape[1:]).index_copy_(0, indices, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (indices,) = ctx.saved_tensors
        return grads[0].index_select(0, indices), None, None


class _Gather(torch.autograd.Function):
    """Select the rows at `indices`: the inverse of `_Scatter`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, indices: Tensor) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.size = len(rows)
        return rows.index_select(0, indices)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (indices,) = ctx.saved_tensors
        return grads[0].new_zeros(ctx.size, *grads[0].shape[1:]).index_copy_(0, indices, grads[0]), None


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    has_sinks: bool,
) -> Tensor:
    """Compute causal attention within each row: of the last T tokens, `(b, H, T, D)`, to all S, `(b, Hkv, S, D)`.

    The padding is on the right, so no real token attends to it.
    """
    length, all_tokens = query.shape[2], key.shape[2]
    if window is not None and window >= all_tokens:
        window = None
    gqa = query.shape[1] != key.shape[1]
    if softcap is None and window is None and length == all_tokens and not has_sinks:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=gqa)
    positions = torch.arange(all_tokens, device=query.device)
    distance = positions[all_tokens - length :, None] - positions
    visible = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    if has_sinks:
        sink = key.new_zeros(key.shape[-1])
        sink[-_SINK_WIDTH] = 1
        key = torch.cat([sink.expand(*key.shape[:2], 1, -1), key], dim=2)
        value, visible = F.pad(value, (0, 0, 1, 0)), F.pad(visible, (1, 0), value=True)
    if softcap is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=scaling, enable_gqa=gqa)
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = (torch.tanh(scores / softcap) * softcap).masked_fill(~visible, float("-inf"))
    return scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype) @ value


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
