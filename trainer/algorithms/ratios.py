"""Ratios of probabilities, from the log-probs of sampled tokens."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trainer.algorithms.aggregation import masked


def at_least_float32(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors in the widest of their types, or float32 if that is wider: ratios overflow half precision."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return tuple(tensor.to(dtype) for tensor in tensors)


def log_ratio(logprobs: Tensor, others: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return `logprobs - others` in float32 or wider; 0, with gradient 0, where `mask` is 0 or both are infinite."""
    logprobs, others = at_least_float32(logprobs, others)
    if mask is not None:  # before the subtraction: an infinity outside of the mask would make the gradient NaN
        logprobs, others = masked(logprobs, mask), masked(others, mask)
    impossible = torch.isinf(logprobs) & (logprobs == others)
    return (logprobs - others).masked_fill(impossible, 0.0)


def limit(dtype: torch.dtype) -> float:
    """Return the largest log-ratio that is exponentiated: a quarter of the type's range, 22 (float32) or 177 (float64).

    A gradient of that size can still be squared and summed into a norm. Every bound in use is far below e^22.
    """
    return math.log(torch.finfo(dtype).max) / 4


def bounded(log_ratios: Tensor) -> Tensor:
    """Return `log_ratios`, limited to +-`limit`."""
    largest = limit(log_ratios.dtype)
    return log_ratios.clamp(-largest, largest)


def beyond(log_ratios: Tensor) -> Tensor:
    """Return where `bounded` removes the gradient."""
    return log_ratios.detach().abs() > limit(log_ratios.dtype)
