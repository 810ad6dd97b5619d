"""A kind of training that is not shipped: policy gradients whose rewards a frozen reward model on the ranks gives."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial

from trainer.config import SCORE, TASKS, Config, RoleSpec, policy_gradient_roles
from trainer.rewards.scorer import RankScorer
from trainer.tasks import Ingredients, Task, rl


def roles(cfg: Config) -> tuple[RoleSpec, ...]:
    """The reward model is in the directory `judge` beside that of the policy."""
    path = os.path.join(os.path.dirname(cfg.model.path), "judge")
    return *policy_gradient_roles(cfg), RoleSpec("judge", path, SCORE, key="judge")


def scorer(given: Ingredients) -> RankScorer:
    return RankScorer("judge", given.learner.last_scores)


def build(cfg: Config) -> Task:
    return rl.build(cfg, partial(rl.sample_episodes, make_scorer=scorer))


TASK = replace(TASKS["rl"], build=build, roles=roles, reward_functions=False)
