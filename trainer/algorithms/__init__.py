"""Pure tensor functions: advantages, policy and value losses, KL, aggregation. Imports torch alone.

One convention everywhere: tensors are `(B, T)`, position t belongs to token t of the sequence (its
log-prob, its reward, the value of the state before it), and `mask` is 1 where that token was generated.
"""

from trainer.algorithms.advantages import ADVANTAGES, gae, grpo
from trainer.algorithms.aggregation import Totals, aggregate
from trainer.algorithms.kl import kl_penalty
from trainer.algorithms.losses import POLICY_LOSSES, clip, value_loss

__all__ = ["ADVANTAGES", "POLICY_LOSSES", "Totals", "aggregate", "clip", "gae", "grpo", "kl_penalty", "value_loss"]
