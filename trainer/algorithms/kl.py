"""Estimators of KL(policy || reference) from the log-probs of sampled tokens."""

from __future__ import annotations

import torch
from torch import Tensor


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, kind: str) -> Tensor:
    """Per-token estimate of KL(policy || reference), `(B, T)`.

    With d = log pi(x) - log pi_ref(x) (Schulman, Approximating KL divergence, 2020):

        k1 = d                    unbiased, high variance, may be negative
        k2 = d^2 / 2              biased, low variance; its gradient is the KL's
        k3 = exp(-d) - 1 + d      unbiased, low variance, never negative
    """
    d = logprobs - ref_logprobs
    if kind == "k1":
        return d
    if kind == "k2":
        return 0.5 * d.square()
    if kind == "k3":
        # expm1 keeps the small KLs of training that exp(-d) - 1 loses to rounding. Beyond a log-ratio of
        # 20 the estimate is linear in effect: clamping keeps one absurd token from overflowing.
        clamped = d.clamp(-20.0, 20.0)
        return torch.expm1(-clamped) + clamped
    raise ValueError(f"algorithm.kl_estimator={kind}: choose one of k1, k2, k3")
