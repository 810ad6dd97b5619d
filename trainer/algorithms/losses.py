"""Policy losses, `POLICY_LOSSES[name](logprobs, old_logprobs, advantages, mask, **options) -> (loss, metrics)`,
and the value loss of the critic.

All tensors are `(B, T)`. `mask` is 1 for completion tokens. r_t = exp(logp_t - old_logp_t), and sg[x] is x without its
gradient. Only `logprobs` get a gradient. A log-ratio is clamped to +-22 (float64: +-177) before it is exponentiated.
The loss is a scalar: this micro-batch's term of the loss of the global mini-batch (see `aggregation`). The metrics are
terms too: `clip_frac` (tokens whose gradient is removed or changed by clipping) and `approx_kl` (k3 of old to new).
Every function has the arguments `aggregation` and `totals`, and its own options.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trainer.algorithms.aggregation import Totals, aggregate, masked
from trainer.algorithms.kl import at_least_float32, clamp_log_ratio, is_clamped, log_ratio
from trainer.algorithms.registry import without_ratio

Loss = tuple[Tensor, dict[str, Tensor]]


def clip(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    aggregation: str = "token_mean",
    totals: Totals | None = None,
) -> Loss:
    """Clipped surrogate (Schulman et al., PPO, 2017, equation 7; separate bounds as in DAPO, Yu et al., 2025).

        L_t = -min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t)

    With `dual_clip` = c, the loss of a token with A_t < 0 is at most -c A_t (Ye et al., 2020).
    """
    logprobs, log_r, advantages = _inputs(logprobs, old_logprobs, advantages, mask)
    ratio = clamp_log_ratio(log_r).exp()
    unclipped, clipped = -ratio * advantages, -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    losses, is_clipped = torch.maximum(unclipped, clipped), clipped > unclipped
    if dual_clip is not None:
        if not dual_clip > 1:
            raise ValueError(f"algorithm.options.dual_clip={dual_clip}: must be above 1")
        ceiling = -dual_clip * advantages
        is_clipped = is_clipped | ((advantages < 0) & (losses > ceiling))
        losses = torch.where(advantages < 0, torch.minimum(losses, ceiling), losses)
    return aggregate(losses, mask, aggregation, totals), _metrics(log_r, is_clipped | is_clamped(log_r), mask, totals)


def gspo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    aggregation: str = "seq_mean_token_mean",
    totals: Totals | None = None,
) -> Loss:
    """Group sequence policy optimisation (Zheng et al., 2025, equations 7 and 13): one ratio for each sequence.

        s_i = exp(mean_t log r_it)          s_it = sg[s_i] exp(logp_it - sg[logp_it])
        L_it = -min(s_it A_it, clip(s_it, 1 - clip_low, 1 + clip_high) A_it)

    The default `aggregation` is the paper's: a mean over sequences.
    """
    logprobs, log_r, advantages = _inputs(logprobs, old_logprobs, advantages, mask)
    mean = log_r.detach().sum(dim=-1, keepdim=True) / (mask > 0).sum(dim=-1, keepdim=True).clamp(min=1)
    ratio = clamp_log_ratio(mean).exp() * (logprobs - logprobs.detach()).exp()
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    losses = torch.maximum(unclipped, clipped)
    return aggregate(losses, mask, aggregation, totals), _metrics(log_r, clipped > unclipped, mask, totals)


def cispo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 1.0,
    clip_high: float = 0.28,
    aggregation: str = "token_mean",
    totals: Totals | None = None,
) -> Loss:
    """Clipped importance-sampling weights (MiniMax-M1, Chen et al., 2025, equation 4). All tokens keep their gradient.

        L_t = -sg[clip(r_t, 1 - clip_low, 1 + clip_high)] A_t logp_t

    With the default `clip_low` = 1 there is no lower clip, as in the paper.
    """
    logprobs, log_r, advantages = _inputs(logprobs, old_logprobs, advantages, mask)
    ratio = clamp_log_ratio(log_r.detach()).exp()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    losses = -weight * advantages * logprobs
    return aggregate(losses, mask, aggregation, totals), _metrics(log_r, weight != ratio, mask, totals)


def sapo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
    aggregation: str = "seq_mean_token_mean",
    totals: Totals | None = None,
) -> Loss:
    """Soft adaptive policy optimisation (Gao et al., 2025): a sigmoid gate instead of a clip.

        L_t = -(4 / tau) sigmoid(tau (r_t - 1)) A_t          tau = tau_pos if A_t > 0 else tau_neg

    At r_t = 1 the gradient equals that of r_t A_t. `clip_frac` counts tokens whose gate has lost half of its slope.
    The default `aggregation` is the paper's: a mean over sequences.
    """
    logprobs, log_r, advantages = _inputs(logprobs, old_logprobs, advantages, mask)
    tau = torch.full_like(advantages, tau_neg).masked_fill(advantages > 0, tau_pos)
    gate = torch.sigmoid(tau * (clamp_log_ratio(log_r).exp() - 1))
    slope = 4 * gate.detach() * (1 - gate.detach())
    losses = -(4 / tau) * gate * advantages
    return aggregate(losses, mask, aggregation, totals), _metrics(log_r, slope < 0.5, mask, totals)


def clip_cov(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    cov_frac: float = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
    aggregation: str = "token_mean",
    totals: Totals | None = None,
) -> Loss:
    """PPO's clip, and no gradient for a few tokens of high covariance (Cui et al., entropy mechanism, 2025, Clip-Cov).

        cov_t = (A_t - mean A) (logp_t - mean logp)

    Candidates are the tokens that the clip does not change and whose covariance is between `cov_low` and `cov_high`.
    The fraction `cov_frac` of all tokens, at least one, is selected from them and detached. The paper selects at
    random. This function selects the highest covariances, so that a run can be repeated. Means and fractions are
    computed over the micro-batch, so this loss depends on how a batch is split.
    """
    logprobs, log_r, advantages = _inputs(logprobs, old_logprobs, advantages, mask)
    ratio = clamp_log_ratio(log_r).exp()
    unclipped, clipped = -ratio * advantages, -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    is_clipped = (clipped > unclipped) | is_clamped(log_r)
    covariance = _covariance(logprobs, advantages, mask)
    candidates = (covariance > cov_low) & (covariance < cov_high) & ~is_clipped
    selected = _highest(torch.where(candidates, covariance, -torch.inf), cov_frac, mask) & candidates
    losses = torch.maximum(unclipped, clipped)
    losses = torch.where(selected, losses.detach(), losses)
    return aggregate(losses, mask, aggregation, totals), _metrics(log_r, is_clipped | selected, mask, totals)


def kl_cov(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    cov_frac: float = 2e-3,
    cov_kl_coef: float = 1.0,
    aggregation: str = "token_mean",
    totals: Totals | None = None,
) -> Loss:
    """KL penalty on the tokens of highest covariance instead of a clip (Cui et al., entropy mechanism, 2025, KL-Cov).

        L_t = -r_t A_t + [t in the fraction cov_frac of highest cov_t] cov_kl_coef |logp_t - old_logp_t|

    Covariance and fraction are computed over the micro-batch (see `clip_cov`). At least one token is selected.
    """
    logprobs, log_r, advantages = _inputs(logprobs, old_logprobs, advantages, mask)
    selected = _highest(_covariance(logprobs, advantages, mask), cov_frac, mask)
    losses = -clamp_log_ratio(log_r).exp() * advantages + torch.where(selected, cov_kl_coef * log_r.abs(), 0.0)
    return aggregate(losses, mask, aggregation, totals), _metrics(log_r, selected | is_clamped(log_r), mask, totals)


@without_ratio
def reinforce(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    aggregation: str = "token_mean",
    totals: Totals | None = None,
) -> Loss:
    """REINFORCE (Williams, 1992): L_t = -A_t logp_t. Unbiased for one optimizer step on fresh samples."""
    logprobs, log_r, advantages = _inputs(logprobs, old_logprobs, advantages, mask)
    is_clipped = torch.zeros_like(log_r, dtype=torch.bool)
    return aggregate(-advantages * logprobs, mask, aggregation, totals), _metrics(log_r, is_clipped, mask, totals)


def importance_weighted_ce(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    max_weight: float = 10.0,
    aggregation: str = "token_mean",
    totals: Totals | None = None,
) -> Loss:
    """Cross-entropy on data of another policy with importance weights: L_t = -sg[min(r_t, max_weight)] A_t logp_t.

    `old_logprobs` are those of the other policy. `advantages` are the weights of the examples. With weight 1, this is
    plain cross-entropy at r = 1. V-trace truncates weights in the same way (Espeholt et al., 2018).
    """
    logprobs, log_r, advantages = _inputs(logprobs, old_logprobs, advantages, mask)
    ratio = clamp_log_ratio(log_r.detach()).exp()
    losses = -ratio.clamp(max=max_weight) * advantages * logprobs
    return aggregate(losses, mask, aggregation, totals), _metrics(log_r, ratio > max_weight, mask, totals)


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    value_clip: float = 0.2,
    totals: Totals | None = None,
) -> Loss:
    """Clipped squared error of the critic (PPO's reference implementation, Dhariwal et al., 2017).

        L_t = max((V_t - R_t)^2, (clip(V_t, V_old - c, V_old + c) - R_t)^2) / 2, mean over tokens

    Args:
        values, old_values, returns, mask: `(B, T)`; only `values` get a gradient.

    Returns:
        the loss (a scalar, this micro-batch's term), and the metric `clip_frac`.
    """
    wide = at_least_float32(values, old_values.detach(), returns.detach())
    values, old_values, returns = (masked(tensor, mask) for tensor in wide)
    clipped = old_values + (values - old_values).clamp(-value_clip, value_clip)
    plain_error, clipped_error = (values - returns).square(), (clipped - returns).square()
    loss = 0.5 * aggregate(torch.maximum(plain_error, clipped_error), mask, "token_mean", totals)
    with torch.no_grad():
        # Inside the range, the two errors differ only by rounding, which must not count as clipping.
        is_clipped = (clipped_error > plain_error) & ((values - old_values).abs() > value_clip)
        metrics = {"clip_frac": aggregate(is_clipped.to(values.dtype), mask, "token_mean", totals)}
    return loss, metrics


def _inputs(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return `logprobs`, log r and `advantages`, in float32 or wider, and 0 where `mask` is 0. The advantages have no
    gradient."""
    shapes = {tuple(tensor.shape) for tensor in (logprobs, old_logprobs, advantages, mask)}
    if len(shapes) > 1:
        raise ValueError(f"a policy loss needs four tensors of the same shape (B, T), not of {sorted(shapes)}")
    logprobs, old_logprobs, advantages = at_least_float32(logprobs, old_logprobs.detach(), advantages.detach())
    return masked(logprobs, mask), log_ratio(logprobs, old_logprobs, mask), masked(advantages, mask)


@torch.no_grad()
def _metrics(log_r: Tensor, is_clipped: Tensor, mask: Tensor, totals: Totals | None) -> dict[str, Tensor]:
    return {
        "clip_frac": aggregate(is_clipped.to(log_r.dtype), mask, "token_mean", totals),
        "approx_kl": aggregate(
            torch.expm1(clamp_log_ratio(log_r)) - clamp_log_ratio(log_r), mask, "token_mean", totals
        ),
    }


@torch.no_grad()
def _covariance(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    active = mask > 0
    if not active.any():
        return torch.zeros_like(advantages)
    covariance = (advantages - advantages[active].mean()) * (logprobs - logprobs[active].mean())
    return torch.where(active, covariance, -torch.inf)


@torch.no_grad()
def _highest(values: Tensor, fraction: float, mask: Tensor) -> Tensor:
    """Return `(B, T)`, True for the `fraction` of completion tokens with the highest values, but at least one token."""
    tokens = int((mask > 0).sum())
    count = min(max(1, int(fraction * tokens)), tokens) if fraction > 0 else 0
    selected = torch.zeros(values.numel(), dtype=torch.bool, device=values.device)
    if count:
        # A stable sort selects the first of equal values on every device.
        selected[torch.argsort(values.flatten(), descending=True, stable=True)[:count]] = True
    return selected.view_as(values)


POLICY_LOSSES: dict[str, Callable[..., Loss]] = {
    function.__name__: function
    for function in (clip, gspo, cispo, sapo, clip_cov, kl_cov, reinforce, importance_weighted_ce)
}
