"""Advantage estimators: `ADVANTAGES[name](rewards, mask, group_ids, **options) -> (advantages, returns)`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trainer.algorithms.aggregation import masked


def grpo(
    rewards: Tensor, mask: Tensor, group_ids: Tensor, *, normalize_std: bool = True, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """Group-relative advantage (Shao et al., DeepSeekMath, 2024, section 4.1).

    With R_i the summed token rewards of completion i and g its group: A_i = R_i - mean_g(R), divided by
    std_g(R) + eps when `normalize_std` (Dr. GRPO, Liu et al. 2025, does without). Each completion token of
    i gets A_i. A group of one, and a group of equal rewards, has advantage 0.

    Args:
        rewards: `(B, T)` token rewards.
        mask: `(B, T)`, 1 = completion token.
        group_ids: `(B,)` long; equal for completions of one prompt.
        normalize_std: divide by the group's (unbiased) standard deviation.

    Returns:
        advantages and returns, both `(B, T)` and equal: there is no critic whose target they could be.
    """
    scores = masked(rewards, mask).sum(dim=-1)
    _, group = torch.unique(group_ids, return_inverse=True)
    count = torch.zeros(int(group.max()) + 1, dtype=scores.dtype, device=scores.device)
    count.index_add_(0, group, torch.ones_like(scores))
    mean = torch.zeros_like(count).index_add_(0, group, scores) / count
    centered = scores - mean[group]
    # Rounding of the mean must not become an advantage of a group whose rewards are all equal.
    low = torch.full_like(count, torch.inf).scatter_reduce_(0, group, scores, "amin")
    high = torch.full_like(count, -torch.inf).scatter_reduce_(0, group, scores, "amax")
    centered = torch.where((low == high)[group], torch.zeros_like(centered), centered)
    if normalize_std:
        variance = torch.zeros_like(count).index_add_(0, group, centered.square()) / (count - 1).clamp(min=1)
        centered = centered / (variance.sqrt()[group] + eps)
    advantages = centered.unsqueeze(-1) * (mask > 0)
    return advantages, advantages


def gae(rewards: Tensor, mask: Tensor, group_ids: Tensor, *, values: Tensor, gamma: float = 1.0, lam: float = 1.0,
        normalize_std: bool = False, eps: float = 1e-8) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Generalised advantage estimation (Schulman et al., 2015, equations 11 and 16).

        delta_t = r_t + gamma V_{t+1} - V_t          A_t = delta_t + gamma lam A_{t+1}

    where t + 1 is the next completion token: tokens with mask 0 (prompt, tool output, padding) are stepped
    over, and the value after the last one is 0.

    Args:
        rewards, mask, values: `(B, T)`; `values[:, t]` is the value of the state before token t.
        normalize_std: whiten the advantages over all completion tokens of the batch.

    Returns:
        advantages and returns (advantage before whitening + value), both `(B, T)`, 0 where mask is 0.
    """
    rewards, values, active = masked(rewards, mask), masked(values, mask), mask > 0
    next_value = torch.zeros_like(rewards[:, 0])
    next_advantage = torch.zeros_like(next_value)
    advantages = torch.zeros_like(rewards)
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * next_advantage
        advantages[:, t] = torch.where(active[:, t], advantage, advantages[:, t])
        next_advantage = torch.where(active[:, t], advantage, next_advantage)
        next_value = torch.where(active[:, t], values[:, t], next_value)
    returns = masked(advantages + values, mask)
    if normalize_std:
        kept = advantages[active]
        if kept.numel() > 1:
            advantages = masked((advantages - kept.mean()) / (kept.std() + eps), mask)
    return advantages, returns


ADVANTAGES: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {"grpo": grpo, "gae": gae}
