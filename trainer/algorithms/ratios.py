"""Ratios of probabilities, computed from the log-probs of sampled tokens."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trainer.algorithms.aggregation import masked


def at_least_float32(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors in their widest dtype, but at least float32, because ratios overflow half precision."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return tuple(tensor.to(dtype) for tensor in tensors)


def log_ratio(logprobs: Tensor, baseline: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return `logprobs - baseline` in float32 or wider. 0, with gradient 0, where `mask` is 0 or both are infinite."""
    logprobs, baseline = at_least_float32(logprobs, baseline)
    if mask is not None:  # before the subtraction, because an infinity outside the mask would make the gradient NaN
        logprobs, baseline = masked(logprobs, mask), masked(baseline, mask)
    both_infinite = torch.isinf(logprobs) & (logprobs == baseline)
    return (logprobs - baseline).masked_fill(both_infinite, 0.0)


def max_log_ratio(dtype: torch.dtype) -> float:
    """Return the largest log-ratio to exponentiate: a quarter of the dtype's range, 22 (float32) or 177 (float64).

    A gradient of that size can still be squared and summed into a norm. Every clipping range in use is far below e^22.
    """
    return math.log(torch.finfo(dtype).max) / 4


def clamp_log_ratio(log_ratios: Tensor) -> Tensor:
    """Return `log_ratios`, clamped to +-`max_log_ratio`."""
    largest = max_log_ratio(log_ratios.dtype)
    return log_ratios.clamp(-largest, largest)


def is_clamped(log_ratios: Tensor) -> Tensor:
    """Return where `clamp_log_ratio` removes the gradient."""
    return log_ratios.detach().abs() > max_log_ratio(log_ratios.dtype)
