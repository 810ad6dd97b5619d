"""Ratios of probabilities, from the log-probs of sampled tokens."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trainer.algorithms.aggregation import masked


def at_least_float32(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the widest of their types, and in float32 at least: half precision has no room for ratios."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return tuple(tensor.to(dtype) for tensor in tensors)


def log_ratio(logprobs: Tensor, others: Tensor, mask: Tensor | None = None) -> Tensor:
    """`logprobs - others`, in float32 at least; 0, with a gradient of 0, where `mask` is 0 or both are infinite."""
    logprobs, others = at_least_float32(logprobs, others)
    if mask is not None:  # before subtracting: an infinity there would leave NaN in the gradient
        logprobs, others = masked(logprobs, mask), masked(others, mask)
    impossible = torch.isinf(logprobs) & (logprobs == others)
    return (logprobs - others).masked_fill(impossible, 0.0)


def limit(dtype: torch.dtype) -> float:
    """The largest log-ratio that is exponentiated: a quarter of the type's range, 22 in float32 and 177 in float64.

    A gradient of that size can still be squared and summed into a norm; e^22 is far outside of any bound in use.
    """
    return math.log(torch.finfo(dtype).max) / 4


def bounded(log_ratios: Tensor) -> Tensor:
    """`log_ratios` cut off at +-`limit`."""
    largest = limit(log_ratios.dtype)
    return log_ratios.clamp(-largest, largest)


def beyond(log_ratios: Tensor) -> Tensor:
    """Where `bounded` takes the gradient away."""
    return log_ratios.detach().abs() > limit(log_ratios.dtype)
