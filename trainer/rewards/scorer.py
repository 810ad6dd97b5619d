"""What gives rewards to the episodes of a step: the protocol, and a scorer that asks a reward model on the ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, Self

import numpy as np

from trainer.episodes import Sample
from trainer.rewards.parsing import Terms
from trainer.rewards.scores import Scores
from trainer.rewards.terms import RewardInput


class Scoring(Protocol):
    """The rewards of some episodes, while they are computed."""

    def add(self, first: int, inputs: Sequence[RewardInput]) -> None:
        """Begin to score episodes that have ended. Others are still generated.

        Args:
            first: index of the first one.
            inputs: whole groups, one after another, or any episodes if `Scorer.wants_groups` is false. Their `episode`
                has the tokens.
        """
        ...

    def finished(self) -> Mapping[int, tuple[float, Terms, str]]:
        """Return reward, terms and the reason of a failure of each episode whose reward is known so far, by its index.

        These are recorded before the others end. A scorer that knows none before `scores` returns nothing.
        """
        ...

    def scores(self, meanwhile: Callable[[], None]) -> Scores:
        """Wait for the rewards of all episodes; return them in the order of the indices.

        Args:
            meanwhile: may be called again and again while this waits. It calls `finished`.
        """
        ...


class Scorer(Protocol):
    """Gives rewards to episodes. A task builds it; `trainer.rewards.scoring.RewardPool` calls reward functions.

    A context manager: the processes that it needs run inside.
    """

    @property
    def uses_ranks(self) -> bool:
        """Whether `Scoring.scores` computes on the ranks. Then engines that share their GPUs sleep meanwhile."""
        ...

    @property
    def wants_groups(self) -> bool:
        """Whether `Scoring.add` needs whole groups: so it is for a scorer that does not say it.

        Otherwise episodes are scored and recorded one by one, as soon as each has ended.
        """
        return True

    def scoring(self, n: int, purpose: str) -> AbstractContextManager[Scoring]:
        """Score the episodes that are added in the block. Several threads may each run such a block.

        Args:
            n: episodes in a group.
            purpose: names what the rewards are for, in messages.
        """
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: Any) -> None: ...


class RankScorer(AbstractContextManager["RankScorer"]):
    """Gives each episode what a reward model on the ranks says of it after its last token.

    Args:
        role: the reward model, a role with the head `score`. The rewards are logged under this name.
        last_scores: of the learner; returns what the role gives each sample.
    """

    uses_ranks = True
    wants_groups = True

    def __init__(self, role: str, last_scores: Callable[[str, Sequence[Sample]], np.ndarray]):
        self._role = role
        self._last_scores = last_scores

    @contextlib.contextmanager
    def scoring(self, n: int, purpose: str) -> Iterator[Scoring]:
        yield _RankScoring(self._role, self._last_scores)

    def __exit__(self, *exception: Any) -> None:
        """Nothing was started."""


class _RankScoring:
    """The ranks score all episodes together, when the last one has ended."""

    def __init__(self, role: str, last_scores: Callable[[str, Sequence[Sample]], np.ndarray]):
        self._role = role
        self._last_scores = last_scores
        self._samples: dict[int, Sample] = {}

    def add(self, first: int, inputs: Sequence[RewardInput]) -> None:
        for index, given in enumerate(inputs, first):
            assert given.episode is not None, "the tokens of the episode"
            self._samples[index] = given.episode.samples[-1]

    def finished(self) -> dict[int, tuple[float, Terms, str]]:
        return {}

    def scores(self, meanwhile: Callable[[], None]) -> Scores:
        samples = [self._samples[index] for index in range(len(self._samples))]
        rewards = self._last_scores(self._role, samples).tolist()
        return Scores(rewards, [Terms({self._role: reward}) for reward in rewards], [""] * len(rewards))
