"""What gives rewards to the episodes of a step: the protocol, and a scorer that asks a reward model on the ranks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, Protocol, Self

import numpy as np

from trainer.episodes import Sample
from trainer.rewards.parsing import Terms
from trainer.rewards.terms import RewardInput, Scores

OnRanks = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Calls a function that computes on the ranks, when they are free; returns its result."""


class Scoring(Protocol):
    """The rewards of groups that begin together."""

    async def score(self, order: int, inputs: Sequence[RewardInput]) -> Scores:
        """Return the rewards of episodes of one group: all of them if `Scorer.wants_groups`.

        Args:
            order: of the group, among those that begin together.
        """
        ...


class Scorer(Protocol):
    """Gives rewards to episodes. A task builds it; `trainer.rewards.scoring.RewardPool` calls reward functions.

    A context manager: the processes that it needs run inside.
    """

    @property
    def uses_ranks(self) -> bool:
        """Whether it computes on the ranks."""
        ...

    @property
    def wants_groups(self) -> bool:
        """Whether it needs whole groups: so it is for a scorer that does not say it.

        Otherwise episodes are scored and recorded one by one, as they end.
        """
        return True

    def open(self, purpose: str, groups: int, on_ranks: OnRanks) -> AbstractAsyncContextManager[Scoring]:
        """Score the episodes of `groups` groups in the block, on an event loop. Several blocks may run.

        Args:
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

    @contextlib.asynccontextmanager
    async def open(self, purpose: str, groups: int, on_ranks: OnRanks) -> AsyncIterator[Scoring]:
        yield _RankScoring(self._role, self._last_scores, groups, on_ranks)

    def __exit__(self, *exception: Any) -> None:
        """Nothing was started."""


class _RankScoring:
    """The ranks score all groups together, when the last one has ended."""

    def __init__(
        self, role: str, last_scores: Callable[[str, Sequence[Sample]], np.ndarray], groups: int, on_ranks: OnRanks
    ):
        self._role = role
        self._last_scores = last_scores
        self._groups = groups
        self._on_ranks = on_ranks
        self._samples: dict[int, list[Sample]] = {}
        self._rewards: asyncio.Future[dict[int, list[float]]] = asyncio.get_running_loop().create_future()

    async def score(self, order: int, inputs: Sequence[RewardInput]) -> Scores:
        self._samples[order] = [given.episode.samples[-1] for given in inputs if given.episode is not None]
        if len(self._samples) == self._groups:
            try:
                self._rewards.set_result(await self._on_ranks(self._compute))
            except Exception as error:
                self._rewards.set_exception(error)
        rewards = (await asyncio.shield(self._rewards))[order]
        return Scores(rewards, [Terms({self._role: reward}) for reward in rewards], [""] * len(rewards))

    def _compute(self) -> dict[int, list[float]]:
        groups = sorted(self._samples.items())
        rewards = iter(self._last_scores(self._role, [one for _, samples in groups for one in samples]).tolist())
        return {order: [next(rewards) for _ in samples] for order, samples in groups}
