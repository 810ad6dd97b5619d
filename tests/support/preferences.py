"""A kind of training that is not shipped: direct preference optimisation (Rafailov et al., 2023) with its reference.

Each group is a pair: the episode with the higher reward was preferred to the other one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from trainer.algorithms.aggregation import masked
from trainer.config import Config, RoleSpec, TaskSpec, policy_role
from trainer.episodes import Episode
from trainer.objectives import Experience, Objective, Outputs
from trainer.objectives.base import GROUP, LossResult
from trainer.parallel.batching import Batch, MicroBatch

BETA = 0.5


def roles(cfg: Config) -> tuple[RoleSpec, ...]:
    return policy_role(cfg), RoleSpec("reference", scores="ref_logprobs")


class Preference(Objective):
    """L = -log sigmoid(beta ((log pi - log ref)(chosen) - (log pi - log ref)(rejected))), mean over pairs."""

    unit = GROUP

    def experience(self, episodes: Sequence[Episode], batch: Batch) -> Experience:
        rewards, groups = np.asarray([episode.reward for episode in episodes]), batch["group_ids"]
        assert (np.bincount(groups) == 2).all(), "each group is a pair"
        means = np.bincount(groups, rewards) / 2
        return Experience(batch | {"sign": np.sign(rewards - means[groups]).astype(np.float32)}, {})

    def totals(self, role: str, batch: Batch) -> Any:
        return len(np.unique(batch["group_ids"]))

    def loss(
        self, role: str, outputs: Outputs, mb: MicroBatch, totals: Any, numbers: Mapping[str, float]
    ) -> LossResult:
        gains = masked(outputs.logprobs - mb["ref_logprobs"], mb["mask"]).sum(dim=1) * mb["sign"]
        pairs, pair = torch.unique(mb["group_ids"], return_inverse=True)
        margins = gains.new_zeros(len(pairs)).index_add(0, pair, gains)
        is_pair = gains.new_zeros(len(pairs)).index_add(0, pair, mb["sign"].abs()) > 1.5  # not so without rows
        losses = -F.logsigmoid(BETA * margins) * is_pair
        accuracy = ((margins > 0) & is_pair).float()
        return losses.sum() / totals, {"accuracy": accuracy.sum() / totals, "margin": margins.detach().sum() / totals}


def build(cfg: Config) -> Any:
    raise NotImplementedError("a source of pairs")


TASK = TaskSpec(build, objective=Preference, roles=roles)
