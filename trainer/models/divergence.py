"""Divergences of the distributions of two models over the vocabulary, for on-policy distillation."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trainer.config.algorithm import FORWARD, JSD, REVERSE
from trainer.models.online_softmax import Vocabulary


def log_softmax(logits: Tensor, vocabulary: Vocabulary) -> Tensor:
    """Return the log-probs `(n, v)` of this rank's slice of the vocabulary."""
    axis = vocabulary.axis
    if axis is None:
        return logits.log_softmax(dim=-1)
    shifted = logits - axis.all_reduce_max(logits.amax(dim=-1))[:, None]
    # Each rank reads the sum for its own slice, so the gradient of the sum comes from all ranks.
    total = axis.all_reduce_grad(axis.all_reduce(shifted.exp().sum(dim=-1)))
    return shifted - total.log()[:, None]


def divergence(teacher: Tensor, policy: Tensor, kind: str, beta: float) -> Tensor:
    """Return this slice's part `(n,)` of a divergence of the distributions p of the teacher and q of the policy.

        forward = KL(p || q)          reverse = KL(q || p)
        jsd = beta KL(p || m) + (1 - beta) KL(q || m) with m = beta p + (1 - beta) q

    The generalised Jensen-Shannon divergence is that of GKD (Agarwal et al., 2023, equation 1).

    Args:
        teacher, policy: log-probs `(n, v)`.
    """
    if kind == FORWARD:
        return _kl(teacher, policy)
    if kind == REVERSE:
        return _kl(policy, teacher)
    assert kind == JSD, kind
    mixture = torch.logaddexp(teacher + math.log(beta), policy + math.log1p(-beta))
    return beta * _kl(teacher, mixture) + (1 - beta) * _kl(policy, mixture)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum(dim=-1)
