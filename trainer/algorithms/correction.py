"""Correction for rollouts whose engine is not quite the policy that is trained: weights, and how far apart they are.

rho_t = exp(logp_trainer_t - logp_engine_t), both of the weights that sampled. Engines differ from trainers in
kernels and precision (Yao et al., Your efficient RL framework secretly brings you off-policy training, 2025).
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.algorithms.aggregation import masked
from trainer.algorithms.ratios import bounded, log_ratio

CORRECTIONS = ("tis", "mis")
LEVELS = ("token", "arithmetic", "geometric", "product")


@torch.no_grad()
def correction_weights(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, *, kind: str, level: str = "token",
    low: float = 0.5, high: float = 2.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Weights for the token losses, `(B, T)`, 0 outside of the mask, and the tokens that a bound acts on.

    Args:
        old_logprobs, rollout_logprobs, mask: `(B, T)`: the trainer's, the engine's.
        kind: `tis`, truncated: min(rho, high) (low is not used); `mis`, masked: rho where low <= rho <= high, else 0
            (the token, or at a sequence level the whole sequence, teaches nothing; means still count it).
        level: of rho: `token`, rho_t; or one for the whole sequence: the `arithmetic` mean of rho_t, their `geometric`
            mean, or their `product`. Its logarithm is cut off at +-22 (float64: +-177).
    """
    log_r = log_ratio(old_logprobs, rollout_logprobs, mask)
    count = (mask > 0).sum(dim=-1, keepdim=True).clamp(min=1)
    if level == "token":
        ratio = bounded(log_r).exp()
    elif level == "arithmetic":
        ratio = masked(bounded(log_r).exp(), mask).sum(dim=-1, keepdim=True) / count
    elif level == "geometric":
        ratio = bounded(log_r.sum(dim=-1, keepdim=True) / count).exp()
    elif level == "product":
        ratio = bounded(log_r.sum(dim=-1, keepdim=True)).exp()
    else:
        raise ValueError(f"algorithm.rollout_correction_level={level}: choose one of {', '.join(LEVELS)}")
    ratio = ratio.expand_as(log_r)
    if kind == "tis":
        weights, bound = ratio.clamp(max=high), ratio > high
    elif kind == "mis":
        bound = (ratio < low) | (ratio > high)
        weights = torch.where(bound, torch.zeros_like(ratio), ratio)
    else:
        raise ValueError(f"algorithm.rollout_correction={kind}: choose one of {', '.join(CORRECTIONS)}")
    return masked(weights, mask), bound & (mask > 0)


@torch.no_grad()
def mismatch(old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> dict[str, float]:
    """How far engine and trainer are apart, over the completion tokens of the batch.

    `kl` (k1 of engine to trainer, mean of -log rho), `k3_kl`, `ratio_p1`, `ratio_p50`, `ratio_p99`, `ratio_max` of
    rho, `ess` (effective sample size, (sum rho)^2 / (N sum rho^2)), `pearson` (correlation of the log-probs).
    """
    ours, theirs = (masked(x, mask)[mask > 0].double() for x in (old_logprobs, rollout_logprobs))
    if not ours.numel():
        return {}
    log_r = bounded(log_ratio(ours, theirs))
    ratio = log_r.exp()
    ordered = ratio.sort().values  # torch.quantile refuses more than 16M values
    points = [_quantile(ordered, q) for q in (0.01, 0.5, 0.99)]
    ours, theirs = ours - ours.mean(), theirs - theirs.mean()
    norm = float(ours.norm() * theirs.norm())
    return {
        "kl": float(-log_r.mean()),
        "k3_kl": float((torch.expm1(log_r) - log_r).mean()),
        "ratio_p1": points[0], "ratio_p50": points[1], "ratio_p99": points[2],
        "ratio_max": float(ratio.max()),
        "ess": float(ratio.sum().square() / (ratio.square().sum() * ratio.numel())),
        "pearson": float(ours @ theirs) / norm if norm > 0 else 1.0,
    }  # fmt: skip


def _quantile(ordered: Tensor, q: float) -> float:
    """With linear interpolation, as numpy's."""
    position = q * (len(ordered) - 1)
    low = int(position)
    below, above = float(ordered[low]), float(ordered[min(low + 1, len(ordered) - 1)])
    return below + (position - low) * (above - below)
