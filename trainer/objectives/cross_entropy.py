"""Cross-entropy: the tokens whose mask is 1 become more likely. Weighted by importance, if another policy sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from trainer.algorithms import Totals, aggregate, importance_weighted_ce
from trainer.algorithms.losses import reinforce
from trainer.objectives.base import LossResult, Objective, Outputs
from trainer.parallel.batching import Batch, MicroBatch


class CrossEntropy(Objective):
    """Supervised training (`sft.*`): one optimizer step on all rows of a step."""

    def mini_batches(self, batch: Batch, step: int) -> list[np.ndarray]:
        return [np.arange(len(batch["lengths"]))]

    def metric_names(self, role: str, names: Sequence[str]) -> list[str]:
        return [f"{'sft' if name in ('loss', 'kl', 'clip_frac') else role}/{name}" for name in names]

    def entropy(self, batch: Batch | MicroBatch) -> str | None:
        return "value" if "rollout_logprobs" in batch else None

    def loss(
        self, role: str, outputs: Outputs, mb: MicroBatch, totals: Totals, numbers: Mapping[str, float]
    ) -> LossResult:
        logprobs, mask, max_weight = outputs.logprobs, mb["mask"], self.cfg.sft.max_weight
        assert logprobs is not None
        if "rollout_logprobs" not in mb:
            return aggregate(-logprobs, mask, "token_mean", totals), {}
        ones, sampled = (mask > 0).to(mask.dtype), mb["rollout_logprobs"]
        if max_weight is None:
            loss, metrics = reinforce(logprobs, sampled, ones, mask, totals=totals)
        else:
            loss, metrics = importance_weighted_ce(logprobs, sampled, ones, mask, max_weight=max_weight, totals=totals)
        metrics["kl"] = metrics.pop("approx_kl")
        if outputs.entropy is not None:
            metrics["entropy"] = aggregate(outputs.entropy.detach(), mask, "token_mean", totals)
        return loss, metrics
