"""What gives rewards to the episodes of a step: the protocol, and scorers that ask a reward model."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, Protocol, Self

import numpy as np

from trainer.episodes import Sample
from trainer.process.model_server import ModelServer
from trainer.rewards.cache import RewardCache, key_of
from trainer.rewards.parsing import Terms
from trainer.rewards.terms import Result, RewardInput, Scores

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


class ServerScorer(AbstractContextManager["ServerScorer"]):
    """Gives each episode what a reward model on a server says of it after its last token, as `RankScorer` does.

    Args:
        name: the rewards are logged under this name.
        cache: answers that a run has got. A resume, and later steps, take them from there.
    """

    uses_ranks = False
    wants_groups = False

    def __init__(self, name: str, server: ModelServer, cache: RewardCache):
        self._name = name
        self._server = server
        self._cache = cache

    @contextlib.asynccontextmanager
    async def open(self, purpose: str, groups: int, on_ranks: OnRanks) -> AsyncIterator[Scoring]:
        yield self

    def __exit__(self, *exception: Any) -> None:
        """Nothing was started."""

    async def score(self, order: int, inputs: Sequence[RewardInput]) -> Scores:
        samples = [given.episode.samples[-1] for given in inputs if given.episode is not None]
        rewards = await asyncio.to_thread(self._compute, [one.token_ids[: one.scored_length] for one in samples])
        return Scores(rewards, [Terms({self._name: reward}) for reward in rewards], [""] * len(rewards))

    def _compute(self, sequences: Sequence[np.ndarray]) -> list[float]:
        keys = [key_of(self._server.weights, {"token_ids": ids.tolist()}) for ids in sequences]
        known = self._cache.find(keys)
        missing = {key: ids for key, ids in zip(keys, sequences, strict=True) if key not in known}
        if missing:
            scores = self._server.scores(list(missing.values())).tolist()
            new: dict[str, Result] = {key: [Terms({"": one})] for key, one in zip(missing, scores, strict=True)}
            self._cache.add(new)
            known |= new
        return [known[key][0][""] for key in keys]
