"""Ratios of probabilities, estimators of KL(policy || reference), and controllers of the KL weight."""

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
    """Return the largest log-ratio to exponentiate: a quarter of the dtype's range, 22 (float32) or 177 (float64). A
    gradient of that size can still be squared and summed into a norm. Every clipping range in use is far below e^22."""
    return math.log(torch.finfo(dtype).max) / 4


def clamp_log_ratio(log_ratios: Tensor) -> Tensor:
    largest = max_log_ratio(log_ratios.dtype)
    return log_ratios.clamp(-largest, largest)


def is_clamped(log_ratios: Tensor) -> Tensor:
    """Return where `clamp_log_ratio` removes the gradient."""
    return log_ratios.detach().abs() > max_log_ratio(log_ratios.dtype)


KL_ESTIMATORS = ("k1", "k2", "k3", "abs", "k1+", "k3+")


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, kind: str, mask: Tensor | None = None) -> Tensor:
    """Return an estimate of KL(policy || reference) for each token, `(B, T)`.

    Where `mask` `(B, T)` is 0, the estimate and its gradient are 0 for any log-probs. Only `logprobs` get a gradient.
    The exponent of k3 is clamped to 22 (float64: 177).

    With d = log pi(x) - log pi_ref(x) (Schulman, Approximating KL divergence, 2020):

        k1 = d                    unbiased, high variance, may be negative
        k2 = d^2 / 2              biased, low variance; has the gradient of the KL
        k3 = exp(-d) - 1 + d      unbiased, low variance, never negative
        abs = |d|
        k1+, k3+                  straight-through: the value of k1 or k3, the gradient of k2. (As losses, k1 and k3 do
                                  not have the gradient of the KL: Tang and Munos, 2025.)
    """
    d = log_ratio(logprobs, ref_logprobs.detach(), mask)
    if kind == "k1":
        return d
    if kind == "k2":
        return 0.5 * d.square()
    if kind == "k3":
        # expm1, because exp(-d) - 1 would round the small KLs of training to 0.
        return torch.expm1((-d).clamp(max=max_log_ratio(d.dtype))) + d
    if kind == "abs":
        return d.abs()
    if kind in ("k1+", "k3+"):
        value, slope = kl_penalty(logprobs, ref_logprobs, kind[:-1], mask), 0.5 * d.square()
        return slope - slope.detach() + value.detach()
    raise ValueError(f"algorithm.kl_estimator={kind}: choose one of {', '.join(KL_ESTIMATORS)}")


def sampled_reverse_kl(logprobs: Tensor, old_logprobs: Tensor, teacher_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return a loss `(B, T)` whose expected gradient is that of KL(policy || teacher), for tokens of the old policy.

        w_t d_t with w_t = pi(x) / pi_old(x) and d_t = log pi(x) - log pi_teacher(x), which has no gradient

    Its value is an unbiased estimate of the KL. Where `mask` is 0, it is 0.
    """
    d = log_ratio(logprobs, teacher_logprobs.detach(), mask).detach()
    return clamp_log_ratio(log_ratio(logprobs, old_logprobs.detach(), mask)).exp() * d


class FixedKL:
    """A constant weight."""

    def __init__(self, coef: float):
        self.coef = coef

    def update(self, kl: float, samples: int) -> None:
        """Do nothing: the weight is constant."""

    def state_dict(self) -> dict[str, float | str]:
        return {"kind": "fixed", "coef": self.coef}

    def load_state_dict(self, state: dict) -> None:
        """Do nothing: the weight comes from the config."""


class AdaptiveKL:
    """A weight that steers the KL towards a target (Ziegler et al., 2019, section 2.2).

        e = clip(KL / target - 1, -0.2, 0.2)          coef <- coef (1 + e samples / horizon)

    Args:
        coef: initial weight.
        target: KL per token, in nats.
        horizon: number of completions over which the weight may change by about a fifth. At least the number of
            completions of one step.
    """

    def __init__(self, coef: float, target: float = 0.05, horizon: float = 10000):
        self.coef = coef
        self.target = target
        self.horizon = horizon

    def update(self, kl: float, samples: int) -> None:
        """Adapt the weight to a step with the mean KL `kl` over `samples` completions."""
        assert math.isfinite(kl) and samples <= self.horizon, (kl, samples, self.horizon)
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.coef *= 1 + error * samples / self.horizon

    def state_dict(self) -> dict[str, float | str]:
        return {"kind": "adaptive", "coef": self.coef}

    def load_state_dict(self, state: dict) -> None:
        """Restore the weight, unless `state` is that of a fixed weight (the config has changed since)."""
        if state["kind"] == "adaptive":
            self.coef = state["coef"]
