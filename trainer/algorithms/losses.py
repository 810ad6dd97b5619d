"""Policy losses: `POLICY_LOSSES[name](logprobs, old_logprobs, advantages, mask, **options) -> (loss, metrics)`,
and the critic's."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trainer.algorithms.aggregation import Totals, aggregate, masked

_MAX_LOG_RATIO = 20.0  # exp(20) = 5e8: far outside every clip range, and finite with its gradient


def clip(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    aggregation: str = "token_mean",
    totals: Totals | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped surrogate (Schulman et al., PPO, 2017, equation 7; separate bounds as in DAPO, Yu et al. 2025).

        L_t = -min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t)     r_t = exp(logp_t - old_logp_t)

    Args:
        logprobs, old_logprobs, advantages, mask: `(B, T)`.
        totals: denominators of the global mini-batch (see `aggregate`).

    Returns:
        the loss (scalar, this piece's share) and metrics, also shares that add up over pieces: `clip_frac`
        (tokens whose clipped term is the smaller) and `approx_kl` (k3 of old to new), means over tokens.
    """
    log_ratio = masked(logprobs - old_logprobs, mask).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    advantages = masked(advantages, mask)
    ratio = log_ratio.exp()
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    loss = aggregate(torch.maximum(unclipped, clipped), mask, aggregation, totals)
    with torch.no_grad():
        metrics = {
            "clip_frac": aggregate((clipped > unclipped).to(ratio.dtype), mask, "token_mean", totals),
            "approx_kl": aggregate(torch.expm1(log_ratio) - log_ratio, mask, "token_mean", totals),
        }
    return loss, metrics


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    value_clip: float = 0.2,
    totals: Totals | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped squared error of the critic (PPO's reference implementation, Dhariwal et al., 2017).

        L_t = max((V_t - R_t)^2, (clip(V_t, V_old - c, V_old + c) - R_t)^2) / 2, mean over tokens

    Args:
        values, old_values, returns, mask: `(B, T)`.

    Returns:
        the loss (scalar, this piece's share) and metrics: `clip_frac`.
    """
    values, old_values, returns = masked(values, mask), masked(old_values, mask), masked(returns, mask)
    clipped = old_values + (values - old_values).clamp(-value_clip, value_clip)
    plain_error, clipped_error = (values - returns).square(), (clipped - returns).square()
    loss = 0.5 * aggregate(torch.maximum(plain_error, clipped_error), mask, "token_mean", totals)
    with torch.no_grad():
        # Inside the range both errors are equal but for rounding, which is not clipping.
        acts = (clipped_error > plain_error) & ((values - old_values).abs() > value_clip)
        metrics = {"clip_frac": aggregate(acts.to(values.dtype), mask, "token_mean", totals)}
    return loss, metrics


POLICY_LOSSES: dict[str, Callable[..., tuple[Tensor, dict[str, Tensor]]]] = {"clip": clip}
