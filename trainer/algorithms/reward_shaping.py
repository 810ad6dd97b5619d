"""Reward shaping, and the selection of groups, before advantages are computed."""

from __future__ import annotations

import torch
from torch import Tensor


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int, factor: float) -> Tensor:
    """Soft penalty for long completions (DAPO, Yu et al., 2025, equation 13), `(B,)`. Add it to the rewards.

        0                                                     if length <= max_length - buffer
        -factor (length - (max_length - buffer)) / buffer     otherwise, down to -factor at max_length

    Args:
        lengths: `(B,)`, numbers of completion tokens.
    """
    if buffer < 1:
        raise ValueError(f"algorithm.overlong_buffer={buffer}: must be at least 1 token")
    excess = (lengths.double() - (max_length - buffer)) / buffer
    return -factor * excess.clamp(0.0, 1.0)


def shape_rewards(rewards: Tensor, lengths: Tensor, max_length: int, buffer: int, factor: float) -> Tensor:
    """Return the rewards `(B,)` to train on: with `overlong_penalty`, unless `buffer` is 0."""
    return rewards + overlong_penalty(lengths, max_length, buffer, factor) if buffer else rewards


def informative_groups(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Return `(B,)`, True where the rewards of the row's group differ.

    With a group baseline, a group of equal rewards has advantage 0 and no gradient.
    """
    _, index = torch.unique(group_ids, return_inverse=True)
    low = torch.full((int(index.max()) + 1,), torch.inf, dtype=rewards.dtype, device=rewards.device)
    high = (-low).scatter_reduce(0, index, rewards, "amax")
    low = low.scatter_reduce(0, index, rewards, "amin")
    return (low != high)[index]
