"""Importance weights that correct the mismatch between engine and trainer log-probs, and metrics of the mismatch.

rho_t = exp(logp_trainer_t - logp_engine_t), both computed with the weights that sampled the token. Engine and trainer
differ in kernels and precision (Yao et al., Your efficient RL framework secretly brings you off-policy training, 2025).
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.algorithms.aggregation import masked
from trainer.algorithms.ratios import clamp_log_ratio, log_ratio

CORRECTIONS = ("tis", "mis")
LEVELS = ("token", "arithmetic", "geometric", "product")


@torch.no_grad()
def correction_weights(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    *,
    kind: str,
    level: str = "token",
    low: float = 0.5,
    high: float = 2.0,
) -> tuple[Tensor, Tensor]:
    """Return the weights of the token losses, and which tokens have a clipped weight. Both are `(B, T)`.

    The weights are 0 where `mask` is 0.

    Args:
        old_logprobs, rollout_logprobs, mask: `(B, T)`; the log-probs of the trainer and of the engine.
        kind: `tis`, truncated: min(rho, high), without `low`; `mis`, masked: rho where low <= rho <= high, otherwise 0.
            A masked token (or sequence) has no gradient, but means still count it.
        level: `token`: rho_t. The other levels have one rho for the complete sequence: the `arithmetic` mean of rho_t,
            their `geometric` mean, or their `product`. The logarithm of rho is clamped to +-22 (float64: +-177).
    """
    log_r = log_ratio(old_logprobs, rollout_logprobs, mask)
    count = (mask > 0).sum(dim=-1, keepdim=True).clamp(min=1)
    if level == "token":
        ratio = clamp_log_ratio(log_r).exp()
    elif level == "arithmetic":
        ratio = masked(clamp_log_ratio(log_r).exp(), mask).sum(dim=-1, keepdim=True) / count
    elif level == "geometric":
        ratio = clamp_log_ratio(log_r.sum(dim=-1, keepdim=True) / count).exp()
    elif level == "product":
        ratio = clamp_log_ratio(log_r.sum(dim=-1, keepdim=True)).exp()
    else:
        raise ValueError(f"algorithm.rollout_correction_level={level}: choose one of {', '.join(LEVELS)}")
    ratio = ratio.expand_as(log_r)
    if kind == "tis":
        weights, is_clipped = ratio.clamp(max=high), ratio > high
    elif kind == "mis":
        is_clipped = (ratio < low) | (ratio > high)
        weights = torch.where(is_clipped, torch.zeros_like(ratio), ratio)
    else:
        raise ValueError(f"algorithm.rollout_correction={kind}: choose one of {', '.join(CORRECTIONS)}")
    return masked(weights, mask), is_clipped & (mask > 0)


@torch.no_grad()
def train_inference_mismatch(old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> dict[str, float]:
    """Return metrics of the mismatch between engine and trainer, over the completion tokens of the batch.

    The metrics are `kl` (k1 of engine to trainer, the mean of -log rho), `k3_kl`, the quantiles `ratio_p1`,
    `ratio_p50` and `ratio_p99` and the maximum `ratio_max` of rho, `ess` (effective sample size, (sum rho)^2 /
    (N sum rho^2)), and `logprob_corr` (correlation of the log-probs). Without a completion token the dict is empty.
    """
    trainer, engine = (masked(x, mask)[mask > 0].double() for x in (old_logprobs, rollout_logprobs))
    if not trainer.numel():
        return {}
    log_r = clamp_log_ratio(log_ratio(trainer, engine))
    ratio = log_r.exp()
    ordered = ratio.sort().values  # torch.quantile supports at most 16M values
    quantiles = [_quantile(ordered, q) for q in (0.01, 0.5, 0.99)]
    trainer, engine = trainer - trainer.mean(), engine - engine.mean()
    norm = float(trainer.norm() * engine.norm())
    return {
        "kl": float(-log_r.mean()),
        "k3_kl": float((torch.expm1(log_r) - log_r).mean()),
        "ratio_p1": quantiles[0],
        "ratio_p50": quantiles[1],
        "ratio_p99": quantiles[2],
        "ratio_max": float(ratio.max()),
        "ess": float(ratio.sum().square() / (ratio.square().sum() * ratio.numel())),
        "logprob_corr": float(trainer @ engine) / norm if norm > 0 else 1.0,
    }


def _quantile(ordered: Tensor, q: float) -> float:
    """Return the quantile `q` of ascending values, with numpy's linear interpolation."""
    position = q * (len(ordered) - 1)
    low = int(position)
    below, above = float(ordered[low]), float(ordered[min(low + 1, len(ordered) - 1)])
    return below + (position - low) * (above - below)
