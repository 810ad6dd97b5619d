"""The softmax of a chunk of logits: its sums in the forward pass, and the gradient of the logits in the backward pass;
and the divergences of two of them.

On a GPU these take as long as the memory is read and written. So what is done to a logit is compiled into one kernel
where blocks are compiled, too. Else it is one operator after another, in place.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from trainer.config.algorithm import FORWARD, JSD, REVERSE, TeacherConfig
from trainer.parallel.ac_and_compile import allow_graphs
from trainer.parallel.collectives import AxisGroup

_NEVER = -80.0  # log-prob of what has no probability, finite so that its part of a divergence is 0
_LEAST_REST = 1e-6  # probability of the tokens beyond the likeliest ones, below which rounding decides it


@dataclass(frozen=True)
class Vocabulary:
    """The slice of the vocabulary whose logits this rank computes."""

    first: int = 0
    axis: AxisGroup | None = None
    """The ranks that have the other slices. None: this rank has the full vocabulary."""

    def maximum(self, values: Tensor) -> Tensor:
        """Return the maxima `(n,)` over all ranks of this rank's `values`."""
        return values if self.axis is None else self.axis.all_reduce_max(values)

    def total(self, *sums: Tensor) -> tuple[Tensor, ...]:
        """Return sums `(n,)` over the full vocabulary from the sums over this rank's slice."""
        return sums if self.axis is None else tuple(self.axis.all_reduce(torch.stack(sums)))


def entries_of(z: Tensor, columns: Tensor) -> Tensor:
    """Return the entries `(n,)` of `z` in these columns `(n,)`; 0 for a column that another slice has."""
    is_local = (columns >= 0) & (columns < z.shape[1])
    return z.gather(-1, (columns * is_local)[:, None])[:, 0].where(is_local, 0)


@dataclass(frozen=True)
class OnlineSoftmax:
    """The sums over a slice of the logits `z` that the softmax of n tokens needs. All tensors are `(n,)`."""

    maximum: Tensor  # the largest logits
    total: Tensor  # sums of `exp(z - maximum)`
    dot: Tensor | None  # sums of `exp(z - maximum) (z - maximum)`, for the entropy
    of_targets: Tensor  # the logits of the targets. 0 where the target is in another slice.

    @classmethod
    def of(cls, z: Tensor, of_targets: Tensor, with_dot: bool, compiled: bool = False) -> OnlineSoftmax:
        """Return the sums over the logits `(n, v)`, which may be overwritten."""
        return cls(*kernel(_sums, compiled)(z, with_dot, not compiled), of_targets)

    def merged(self, other: OnlineSoftmax) -> OnlineSoftmax:
        """Return the sums over both slices."""
        maximum = torch.maximum(self.maximum, other.maximum)
        a, b = self.relative_to(maximum), other.relative_to(maximum)
        dot = None if a.dot is None or b.dot is None else a.dot + b.dot
        return OnlineSoftmax(maximum, a.total + b.total, dot, a.of_targets + b.of_targets)

    def relative_to(self, maximum: Tensor) -> OnlineSoftmax:
        """Return the same sums with `maximum` in place of the largest logits."""
        lower = self.maximum - maximum
        factor = lower.exp()
        dot = None if self.dot is None else factor * (self.dot + lower * self.total)
        return OnlineSoftmax(maximum, factor * self.total, dot, self.of_targets)


def kernel(function: Callable, compiled: bool) -> Callable:
    """Return `function`, compiled for any sizes if so."""
    return _compiled(function) if compiled else function


@functools.cache
def _compiled(function: Callable) -> Callable:
    compiled = torch.compile(function, dynamic=True)

    def call(*args: Any) -> Any:
        allow_graphs()  # here, because on a GPU the backward pass is in a thread of its own
        return compiled(*args)

    return call


def _sums(z: Tensor, with_dot: bool, in_place: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the first three tensors of an `OnlineSoftmax`. `in_place`: overwrite `z`. A compiled function does not,
    because it would write `z` to memory for that."""
    maximum = z.amax(dim=-1)
    z = torch.sub(z, maximum[:, None], out=z if in_place else None)
    _avoid_denormals(z)
    if not with_dot:
        return maximum, z.exp_().sum(dim=-1), None
    p = z.exp()
    return maximum, p.sum(dim=-1), z.mul_(p).sum(dim=-1)


def gradient_of_logits(
    z: Tensor,
    columns: Tensor,
    normalizers: Tensor,
    of_logprobs: Tensor,
    entropies: Tensor | None,
    of_entropies: Tensor | None,
    inverse_bound: float | None,
    dtype: torch.dtype,
    in_place: bool,
) -> Tensor:
    """Return the gradient `(n, v)` of the logits `z` of a slice, which may be overwritten, in precision `dtype`.

    Args:
        columns: `(n,)`, those of the targets; outside of the slice there is none.
        normalizers: `(n,)`, the logarithms of the sums of `exp(z)` over the full vocabulary.
        of_logprobs, of_entropies: `(n,)`, the gradients of both, times minus the slope of the logits.
        entropies: `(n,)`. None: they have no gradients.
        inverse_bound: 1 over the largest logit that the soft cap allows. None: there is no cap.
        in_place: see `_sums`.
    """
    curvature = None if inverse_bound is None else (z * inverse_bound).square_().neg_().add_(1)
    z = torch.sub(z, normalizers[:, None], out=z if in_place else None)  # log p
    _avoid_denormals(z)
    if entropies is not None and of_entropies is not None:
        p = z.exp()
        z.add_(entropies[:, None]).mul_(of_entropies[:, None]).add_(of_logprobs[:, None]).mul_(p)
        del p
    else:
        z.exp_().mul_(of_logprobs[:, None])
    # z is now the gradient without the term of the target.
    if in_place:
        is_local = (columns >= 0) & (columns < z.shape[1])
        z.scatter_add_(-1, (columns * is_local)[:, None], (-of_logprobs).where(is_local, 0)[:, None])
    else:
        is_target = torch.arange(z.shape[1], device=z.device) == columns[:, None]
        z = z - torch.where(is_target, of_logprobs[:, None], 0)
    return (z if curvature is None else z.mul_(curvature)).to(dtype)


def _avoid_denormals(z: Tensor) -> None:
    """Clamp logarithms in place, so that their exponentials are normal numbers. CPUs take thirty times as long for
    `exp` if the result is a denormal number."""
    if not z.is_cuda:
        z.clamp_(min=math.ceil(math.log(torch.finfo(z.dtype).tiny)))


# ---------------------------------------------------------------------------------------------------
# Divergences of two models over the vocabulary, for on-policy distillation


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


@dataclass(frozen=True)
class LikeliestTokens:
    """What a teacher on a server says of its distributions at n targets."""

    ids: Tensor  # `(n, k)`: its likeliest tokens
    logprobs: Tensor  # `(n, k)`, at temperature 1
    settings: TeacherConfig

    def select(self, chosen: Tensor | slice) -> LikeliestTokens:
        """Return those at some targets."""
        return replace(self, ids=self.ids[chosen], logprobs=self.logprobs[chosen])

    def divergence(self, of_policy: Tensor) -> Tensor:
        """Return the divergence `(n,)` from the policy's log-probs `(n, v)`: the other tokens are one outcome."""
        is_beyond = self.ids >= of_policy.shape[1]  # a column that the policy does not have
        ids = self.ids.masked_fill(is_beyond, 0)
        distributions = []
        for logprobs in (self.logprobs.to(of_policy.dtype), of_policy.gather(1, ids)):
            logprobs = logprobs.masked_fill(is_beyond, _NEVER)
            rest = torch.log1p(-logprobs.exp().sum(dim=-1).clamp(max=1 - _LEAST_REST))
            distributions.append(torch.cat([logprobs, rest[:, None]], dim=-1))
        return divergence(*distributions, self.settings.divergence, self.settings.beta)
