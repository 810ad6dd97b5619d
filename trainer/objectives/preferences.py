"""Objectives over pairs of answers, of which one was preferred: a policy against its reference, and a reward model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trainer.algorithms.aggregation import masked
from trainer.algorithms.preferences import DPO_LOSSES, LogRatios, bradley_terry
from trainer.episodes import MARGIN, Episode
from trainer.import_utils import parameter_names
from trainer.objectives.base import GROUP, Experience, LossResult, Objective, Outputs
from trainer.parallel.batching import Batch, MicroBatch


class PairTotals(NamedTuple):
    pairs: int
    chosen_tokens: int  # tokens to learn of the chosen answers


class Pairs:
    """The P pairs of a micro-batch, whose rows are the answers."""

    def __init__(self, mb: MicroBatch):
        self.is_chosen: Tensor = mb["is_chosen"]
        pairs, self._pair = torch.unique(mb["group_ids"], return_inverse=True)
        self._count = len(pairs)

    def split(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values `(b,)` of the rows as those of the chosen and of the rejected answers, each `(P,)`."""
        # Each pair has one row of either that is not 0, so the order of the sum does not matter.
        empty, rows = values.new_zeros(self._count), (values * self.is_chosen, values * (1 - self.is_chosen))
        chosen, rejected = (empty.index_add(0, self._pair, one) for one in rows)
        return chosen, rejected


class Preference(Objective):
    """The base class: each group is a pair, the episode with the higher reward was preferred to the other one."""

    unit = GROUP
    computes_as_updated = True

    def experience(self, episodes: Sequence[Episode], batch: Batch) -> Experience:
        groups = batch["group_ids"]
        rewards = np.asarray([episode.reward for episode in episodes])
        assert len(groups) == len(episodes) and (np.bincount(groups) == 2).all(), "each group is a pair"
        is_chosen = (rewards > (np.bincount(groups, rewards) / 2)[groups]).astype(np.float32)
        assert (np.bincount(groups, is_chosen) == 1).all(), "one answer of each pair was preferred"
        margins = np.asarray([episode.rewards.get(MARGIN, 0.0) for episode in episodes], dtype=np.float32)
        return Experience(batch | {"is_chosen": is_chosen, "margins": margins}, {})

    def metric_names(self, role: str, names: Sequence[str]) -> list[str]:
        return [name if "/" in name else f"{role}/{name}" for name in names]

    def totals(self, role: str, batch: Batch) -> PairTotals:
        tokens = int((batch["mask"][batch["is_chosen"] > 0] > 0).sum())
        return PairTotals(len(np.unique(batch["group_ids"])), max(1, tokens))


def describe_pairs(chosen: Tensor, rejected: Tensor, pairs: int) -> dict[str, Tensor]:
    found = {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/accuracies": (chosen > rejected).to(chosen.dtype),
        "rewards/margins": chosen - rejected,
    }
    return {name: values.detach().sum() / pairs for name, values in found.items()}


class DPO(Preference):
    """Direct preference optimisation and its variants (`dpo.*`). A reward is beta (log pi - log ref); without a
    reference it is beta times the mean of log pi over the tokens."""

    def loss(
        self, role: str, outputs: Outputs, mb: MicroBatch, totals: PairTotals, numbers: Mapping[str, float]
    ) -> LossResult:
        dpo, pairs, mask, logprobs = self.cfg.dpo, Pairs(mb), mb["mask"], outputs.logprobs
        assert logprobs is not None
        tokens = (mask > 0).sum(dim=1).to(logprobs.dtype)
        has_reference = "reference" in self.roles
        gains = logprobs - mb["ref_logprobs"] if has_reference else logprobs
        ratios = LogRatios(
            *pairs.split(masked(gains, mask).sum(dim=1)), *(count.clamp(min=1) for count in pairs.split(tokens))
        )
        loss = self._losses(ratios).sum() / totals.pairs
        of_answers = masked(logprobs, mask).sum(dim=1)
        chosen, rejected = pairs.split(of_answers)
        rewards = ratios if has_reference else ratios.means
        metrics = describe_pairs(dpo.beta * rewards.chosen, dpo.beta * rewards.rejected, totals.pairs)
        metrics["logps/chosen"] = chosen.detach().sum() / totals.pairs
        metrics["logps/rejected"] = rejected.detach().sum() / totals.pairs
        if dpo.sft_coef > 0:
            sft = -chosen.sum() / totals.chosen_tokens
            loss = loss + dpo.sft_coef * sft
            metrics["dpo/sft_loss"] = sft.detach()
        return loss, metrics

    def _losses(self, ratios: LogRatios) -> Tensor:
        dpo = self.cfg.dpo
        function = DPO_LOSSES[dpo.loss_type]
        gamma = 0.5 if dpo.simpo_gamma is None else dpo.simpo_gamma
        options = {"label_smoothing": dpo.label_smoothing, "simpo_gamma": gamma}
        return function(
            ratios, dpo.beta, **{name: options[name] for name in options.keys() & parameter_names(function)}
        )


class RewardModel(Preference):
    """A reward model by pairs (`rm.*`): the score of the state after the last token to learn, the stop token."""

    extremes = {"rm/min_reward": "min", "rm/max_reward": "max"}

    def loss(
        self, role: str, outputs: Outputs, mb: MicroBatch, totals: PairTotals, numbers: Mapping[str, float]
    ) -> LossResult:
        pairs, mask, values = Pairs(mb), mb["mask"], outputs.values
        assert values is not None
        last = ((mask > 0) * torch.arange(mask.shape[1], device=mask.device)).argmax(dim=1)
        scores = values.gather(1, last[:, None])[:, 0]
        chosen, rejected = pairs.split(scores)
        margins, _ = pairs.split(mb["margins"])
        losses = bradley_terry(chosen, rejected, margins, self.cfg.rm.center_rewards_coefficient)
        metrics = describe_pairs(chosen, rejected, totals.pairs)
        metrics["rm/accuracy"], metrics["rm/margin"] = metrics["rewards/accuracies"], metrics["rewards/margins"]
        metrics["rm/mean_reward"] = scores.detach().sum() / (2 * totals.pairs)
        metrics |= {"rm/min_reward": scores.detach().min(), "rm/max_reward": scores.detach().max()}
        return losses.sum() / totals.pairs, metrics
