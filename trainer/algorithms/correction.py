"""Importance weights of sampled tokens: the policy before the update against the policy that sampled.

rho_t = exp(logp_trainer_t - logp_engine_t). The trainer computes its log-probs before the update. They differ from the
engine's for two reasons. Engine and trainer have other kernels and another precision (Yao et al., Your efficient RL
framework secretly brings you off-policy training, 2025). And with `rollout.ahead` the engine had older weights.

With older weights, rho separates the two meanings of "old policy" in the clipped surrogate (Hilton et al., Batch
size-invariance for policy optimization, 2022; Fu et al., AReaL, 2025):

    L_t = sg[rho_t] surrogate(r_t, A_t)
    r_t = policy / policy before the update          rho_t = policy before the update / sampler

The clip counts from the weights before the update, so older samples have as much room as fresh ones. Therefore
`algorithm.rollout_correction=auto` is `tis` with `rollout.ahead`. With `algorithm.old_logprobs=rollout` the sampler
itself is the old policy: r_t = policy / sampler contains rho_t, and there is no further weight. This is what each loss
does with older samples:

- `clip`, `clip_cov`: recompute: the surrogate above. rollout: older weights use up the room of the clip.
- `gspo`: recompute: rho weighs the tokens; `rollout_correction_level=geometric` has the loss's own ratio. rollout: the
  narrow bounds clip nearly every older sequence; not recommended.
- `cispo`, `importance_weighted_ce`: recompute: two weights, each with its own bound. rollout: one weight with the bound
  of the loss, as in V-trace (Espeholt et al., 2018).
- `sapo`: recompute: the gate has its full slope before the update. rollout: it closes where older weights differ.
- `kl_cov`: recompute: rho weighs the surrogate, but not the penalty. rollout: a ratio without a bound.
- `reinforce`: recompute: truncated importance sampling. rollout: refused, because this loss has no ratio, unless the
  correction is `off`.

A loss that is given by import path gets the same arrays. The loss of a critic has no weight: its returns are those of
the samples.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.algorithms.aggregation import masked
from trainer.algorithms.kl import clamp_log_ratio, log_ratio

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
        raise ValueError(f"algorithm.options.rollout_correction_level={level}: choose one of {', '.join(LEVELS)}")
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

    The metrics are `kl` (k1 of engine to trainer, the mean of -log rho), `k3_kl`, the maximum `ratio_max` of rho, `ess`
    (effective sample size, (sum rho)^2 / (N sum rho^2)), and `logprob_corr` (correlation of the log-probs). Without a
    completion token the dict is empty.
    """
    trainer, engine = (masked(x, mask)[mask > 0].double() for x in (old_logprobs, rollout_logprobs))
    if not trainer.numel():
        return {}
    log_r = clamp_log_ratio(log_ratio(trainer, engine))
    ratio = log_r.exp()
    trainer, engine = trainer - trainer.mean(), engine - engine.mean()
    norm = float(trainer.norm() * engine.norm())
    return {
        "kl": float(-log_r.mean()),
        "k3_kl": float((torch.expm1(log_r) - log_r).mean()),
        "ratio_max": float(ratio.max()),
        "ess": float(ratio.sum().square() / (ratio.square().sum() * ratio.numel())),
        "logprob_corr": float(trainer @ engine) / norm if norm > 0 else 1.0,
    }
