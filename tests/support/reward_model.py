"""Kinds of training that are not shipped: with a frozen reward model on the ranks, and of a reward model."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from tests.support.preferences import TASK as PREFERENCE
from tests.support.preferences import Preference
from trainer.config import SCORE, TASKS, Config, RoleSpec, policy_gradient_roles, policy_role
from trainer.objectives import Outputs
from trainer.objectives.base import LossResult
from trainer.parallel.batching import MicroBatch
from trainer.rewards.scorer import RankScorer
from trainer.tasks import Ingredients, Task, rl


def roles(cfg: Config) -> tuple[RoleSpec, ...]:
    """The reward model is in the directory `judge` beside that of the policy."""
    path = os.path.join(os.path.dirname(cfg.model.path), "judge")
    return *policy_gradient_roles(cfg), RoleSpec("judge", path, SCORE, path_key="judge")


def add_score_head(path: Path, scale: float = 1.0) -> None:
    """Make a reward model of the tiny model in a directory."""
    file, config = path / "model.safetensors", json.loads((path / "config.json").read_text())
    head = scale * torch.randn(1, config["hidden_size"], generator=torch.Generator().manual_seed(1))
    save_file({**load_file(file), "score.weight": head}, file, metadata={"format": "pt"})
    config |= {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    (path / "config.json").write_text(json.dumps(config))


def scorer(given: Ingredients) -> RankScorer:
    return RankScorer("judge", given.learner.last_scores)


def build(cfg: Config) -> Task:
    return rl.build(cfg, partial(rl.sample_episodes, make_scorer=scorer))


TASK = replace(TASKS["rl"], build=build, roles=roles, reward_functions=False)


class Ranking(Preference):
    """L = -log sigmoid(r(chosen) - r(rejected)) (Bradley and Terry, 1952), r the score after the last token."""

    def loss(
        self, role: str, outputs: Outputs, mb: MicroBatch, totals: Any, numbers: Mapping[str, float]
    ) -> LossResult:
        last = (mb["mask"] * torch.arange(mb["mask"].shape[1], device=mb["mask"].device)).argmax(dim=1)
        scores = outputs.values.gather(1, last[:, None])[:, 0] * mb["sign"]
        pairs, pair = torch.unique(mb["group_ids"], return_inverse=True)
        margins = scores.new_zeros(len(pairs)).index_add(0, pair, scores)
        is_pair = scores.new_zeros(len(pairs)).index_add(0, pair, mb["sign"].abs()) > 1.5  # not so without rows
        losses = -F.logsigmoid(margins) * is_pair
        return losses.sum() / totals, {"margin": margins.detach().sum() / totals}


TRAINED = replace(
    PREFERENCE,
    objective=Ranking,
    roles=lambda cfg: (replace(policy_role(cfg), head=SCORE),),
    best="policy/margin",
    metrics={"policy/margin": PREFERENCE.metrics["policy/margin"]},
)
"""The reward model itself is trained, on pairs (see `tests.support.preferences`)."""
