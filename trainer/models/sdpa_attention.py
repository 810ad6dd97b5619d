"""Attention of a packed row with SDPA: one call for each bucket of sequences of similar length."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.parallel.packing import Bucket, Packing, take


def attend_buckets(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packing: Packing,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Compute causal attention within each sequence (see `packed_attention`): `(1, N, H, D)`."""
    queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    buckets = packing.buckets
    if any(packing.shared):
        keys, values = take(keys, packing.key_places), take(values, packing.key_places)
    parts = [
        _attend_bucket(*tensors, bucket, places, scaling, window, softcap)
        for *tensors, bucket, places in zip(
            queries.split([bucket.tokens for bucket in buckets]),
            keys.split([bucket.keys for bucket in buckets]),
            values.split([bucket.keys for bucket in buckets]),
            buckets,
            packing.bucket_places,
            strict=True,
        )
    ]
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[None]


def _attend_bucket(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    bucket: Bucket,
    places: tuple[Tensor, Tensor],
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Compute the attention of one bucket's own tokens, `(tokens, H, D)`, to all tokens of their sequences."""
    rows, (of_queries, of_keys) = len(bucket.lengths), places

    def padded(tensor: Tensor, own: Tensor, longest: int) -> Tensor:
        """Turn tokens `(n, H, D)` into `(rows, H, longest, D)`."""
        even = tensor if bucket.is_even else _Spread.apply(tensor, own, rows * longest)
        return even.unflatten(0, (rows, longest)).transpose(1, 2)

    whole = bucket.longest + bucket.shared
    out = _attend(
        padded(queries, of_queries, bucket.longest),
        padded(keys, of_keys, whole),
        padded(values, of_keys, whole),
        scaling,
        window,
        softcap,
    )
    flat = out.transpose(1, 2).flatten(0, 1)
    return flat if bucket.is_even else _Collect.apply(flat, of_queries)


class _Spread(torch.autograd.Function):
    """Copy row i to `places[i]` of `size` rows of zeros. No place repeats, so forward and backward only copy."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(places)
        return rows.new_zeros(size, *rows.shape[1:]).index_copy_(0, places, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return grads[0].index_select(0, places), None, None


class _Collect(torch.autograd.Function):
    """Take the rows at `places`: the inverse of `_Spread`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.size = len(rows)
        return rows.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (places,) = ctx.saved_tensors
        return grads[0].new_zeros(ctx.size, *grads[0].shape[1:]).index_copy_(0, places, grads[0]), None


def _attend(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None, softcap: float | None
) -> Tensor:
    """Compute causal attention within each row: of the last T tokens, `(b, H, T, D)`, to all S, `(b, Hkv, S, D)`.

    No real token attends to the padding on the right.
    """
    length, all_tokens = query.shape[2], key.shape[2]
    if window is not None and window >= all_tokens:
        window = None
    gqa = query.shape[1] != key.shape[1]
    if softcap is None and window is None and length == all_tokens:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=gqa)
    places = torch.arange(all_tokens, device=query.device)
    distance = places[all_tokens - length :, None] - places
    visible = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    if softcap is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=scaling, enable_gqa=gqa)
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = (torch.tanh(scores / softcap) * softcap).masked_fill(~visible, float("-inf"))
    return scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype) @ value
