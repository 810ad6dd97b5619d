"""Pure tensor functions: advantages, policy and value losses, KL, aggregation. Their only package is torch.

All functions use one convention: tensors are `(B, T)`, position t belongs to token t of the sequence (its log-prob, its
reward, the value of the state before it), and `mask` is 1 for tokens that the policy has generated.
"""

from trainer.algorithms.advantages import (
    ADVANTAGES,
    MovingAverages,
    informative_groups,
    overlong_penalty,
    shape_rewards,
)
from trainer.algorithms.aggregation import AGGREGATIONS, Totals, aggregate
from trainer.algorithms.correction import CORRECTIONS, LEVELS, correction_weights, train_inference_mismatch
from trainer.algorithms.kl import KL_ESTIMATORS, AdaptiveKL, FixedKL, kl_penalty, sampled_reverse_kl
from trainer.algorithms.losses import POLICY_LOSSES, importance_weighted_ce, value_loss
from trainer.algorithms.registry import resolve
