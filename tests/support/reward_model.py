"""A kind of training that is not shipped: policy gradients whose rewards a frozen reward model on the ranks gives."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from trainer.config import SCORE, Config, RoleSpec
from trainer.config.role_specs import policy_gradient_roles
from trainer.config.tasks import TASKS
from trainer.learner.learner import Learner
from trainer.rewards.parsing import Terms
from trainer.rewards.scores import Scores
from trainer.rewards.terms import RewardInput
from trainer.tasks import Ingredients, Task, rl


def roles(cfg: Config) -> tuple[RoleSpec, ...]:
    """The reward model is in the directory `judge` beside that of the policy."""
    path = os.path.join(os.path.dirname(cfg.model.path), "judge")
    return *policy_gradient_roles(cfg), RoleSpec("judge", path, SCORE, key="judge")


class RankScorer(contextlib.AbstractContextManager["RankScorer"]):
    """Gives each episode the score of its last token."""

    uses_ranks = True

    def __init__(self, given: Ingredients):
        self._learner = given.learner

    @contextlib.contextmanager
    def scoring(self, n: int, purpose: str, known: int) -> Iterator[RankScoring]:
        yield RankScoring(self._learner)

    def __exit__(self, *exception: object) -> None:
        """Nothing was started."""


class RankScoring:
    """The ranks score all episodes together, when the last one has ended."""

    def __init__(self, learner: Learner):
        self._learner = learner
        self._inputs: dict[int, RewardInput] = {}

    def add(self, first: int, inputs: Sequence[RewardInput]) -> None:
        self._inputs |= dict(enumerate(inputs, first))

    def finished(self) -> dict[int, tuple[float, Terms, str]]:
        return {}

    def scores(self, meanwhile: Callable[[], None]) -> Scores:
        episodes = [self._inputs[index].episode for index in range(len(self._inputs))]
        rewards = self._learner.last_scores("judge", [episode.samples[-1] for episode in episodes]).tolist()
        return Scores(rewards, [Terms({"judge": reward}) for reward in rewards], [""] * len(rewards))


def build(cfg: Config) -> Task:
    return rl.build(cfg, partial(rl.sample_episodes, make_scorer=RankScorer))


TASK = replace(TASKS["rl"], build=build, roles=roles, unused=("reward.name",))
