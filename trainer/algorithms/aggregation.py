"""Reduce token losses to one number that does not depend on how a batch is split.

A mini-batch is split over ranks and micro-batches. For each micro-batch, the functions return its term of the global
loss:

    token_mean               sum_it m_it x_it / sum_it m_it
    seq_mean_token_mean      sum_i (sum_t m_it x_it / sum_t m_it) / N
    seq_mean_token_sum       sum_i (sum_t m_it x_it) / N
    seq_mean_token_sum_norm  sum_i (sum_t m_it x_it) / (N L)

with i over the global mini-batch's sequences that have a completion token (N of them), m the mask and L a constant
length. The denominators are `Totals`, which are known before the first micro-batch is computed. Therefore the losses
(and gradients) of the micro-batches, summed over all micro-batches and ranks, are the loss (and gradient) of the
mini-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm")


@dataclass(frozen=True)
class Totals:
    """Denominators of a global mini-batch."""

    tokens: float  # number of completion tokens
    sequences: float  # number of sequences with at least one completion token
    max_tokens: float  # the constant length L of `seq_mean_token_sum_norm`

    @classmethod
    def of(cls, mask: Tensor, max_tokens: float | None = None) -> Totals:
        """Return the totals of a batch with this `mask` `(B, T)`. L is `max_tokens`, or T if that is None."""
        active = mask > 0  # integers, because a sum of ones in the mask's dtype may be rounded
        return cls(
            tokens=float(active.sum()),
            sequences=float(active.any(dim=-1).sum()),
            max_tokens=float(mask.shape[-1] if max_tokens is None else max_tokens),
        )


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """Return `values` where `mask` is 1 and 0 elsewhere, even if `values` is infinite or NaN there."""
    return torch.where(mask > 0, values, torch.zeros((), dtype=values.dtype, device=values.device))


def aggregate(values: Tensor, mask: Tensor, kind: str = "token_mean", totals: Totals | None = None) -> Tensor:
    """Return this micro-batch's term of the global mean of `values` `(B, T)`, a scalar.

    Args:
        mask: `(B, T)`; 1 for completion tokens.
        kind: one of `AGGREGATIONS`.
        totals: denominators of the global mini-batch. None: those of this batch.
    """
    if kind not in AGGREGATIONS:
        raise ValueError(f"algorithm.aggregation={kind}: choose one of {', '.join(AGGREGATIONS)}")
    totals = totals or Totals.of(mask)
    active = masked(values, mask)
    if kind == "token_mean":
        return active.sum() / max(totals.tokens, 1.0)
    rows = active.sum(dim=-1)
    if kind == "seq_mean_token_mean":
        rows = rows / (mask > 0).sum(dim=-1).clamp(min=1)
    scale = totals.max_tokens if kind == "seq_mean_token_sum_norm" else 1.0
    return rows.sum() / (max(totals.sequences, 1.0) * max(scale, 1.0))
