"""What gives rewards to the episodes of a step: the protocol, what it takes and gives, and reward models."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import numpy as np

from trainer.episodes import Episode, Sample
from trainer.process.model_server import ModelServer
from trainer.rewards.cache import RewardCache, key_of
from trainer.rewards.parsing import Result, Terms


@dataclass(frozen=True)
class RewardInput:
    """A completion to score, with all that a reward may ask for."""

    completion: str
    answer: str
    prompt: str = ""
    messages: Sequence[Mapping[str, Any]] = ()
    row: Mapping[str, Any] = field(default_factory=dict)
    status: str = "stop"
    episode: Episode | None = None
    """With its tokens, for a scorer that reads them. Reward functions get the text."""


@dataclass
class Scores:
    rewards: list[float]  # where a reward failed: 0, or the sum of the terms that did not fail
    terms: list[Terms]  # the terms of each reward, before they are weighed
    reasons: list[str]  # why each reward failed; empty for one that did not

    def each(self) -> list[tuple[float, Terms, str]]:
        return list(zip(self.rewards, self.terms, self.reasons, strict=True))


OnRanks = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Calls a function that computes on the ranks, when they are free; returns its result."""


class Scoring(Protocol):
    """The rewards of groups that begin together."""

    async def score(self, order: int, inputs: Sequence[RewardInput]) -> Scores:
        """Return the rewards of episodes of the group with this `order`: all of them if `Scorer.wants_groups`."""


class Scorer(Protocol):
    """Gives rewards to episodes. A task builds it; `trainer.rewards.scoring.RewardPool` calls reward functions. A
    context manager: the processes that it needs run inside."""

    @property
    def uses_ranks(self) -> bool: ...

    @property
    def wants_groups(self) -> bool:
        """Whether it needs whole groups, as a scorer does that does not say it. Otherwise episodes are scored and
        recorded one by one, as they end."""
        return True

    def open(self, purpose: str, groups: int, on_ranks: OnRanks) -> AbstractAsyncContextManager[Scoring]:
        """Score the episodes of `groups` groups in the block, on an event loop. Several blocks may run. `purpose` names
        what the rewards are for, in messages."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: Any) -> None: ...


def _last_samples(inputs: Sequence[RewardInput]) -> list[Sample]:
    return [given.episode.samples[-1] for given in inputs if given.episode is not None]


def _named(name: str, rewards: list[float]) -> Scores:
    return Scores(rewards, [Terms({name: reward}) for reward in rewards], [""] * len(rewards))


class _ModelScorer(AbstractContextManager["_ModelScorer"]):
    def __exit__(self, *exception: Any) -> None:
        """Nothing was started."""


class RankScorer(_ModelScorer):
    """Gives each episode the score of the reward model `role` on the ranks after its last token."""

    uses_ranks = True
    wants_groups = True

    def __init__(self, role: str, last_scores: Callable[[str, Sequence[Sample]], np.ndarray]):
        self._role = role
        self._last_scores = last_scores

    @contextlib.asynccontextmanager
    async def open(self, purpose: str, groups: int, on_ranks: OnRanks) -> AsyncIterator[Scoring]:
        yield _RankScoring(self._role, self._last_scores, groups, on_ranks)


class _RankScoring:
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
        self._samples[order] = _last_samples(inputs)
        if len(self._samples) == self._groups:
            try:
                self._rewards.set_result(await self._on_ranks(self._compute))
            except Exception as error:
                self._rewards.set_exception(error)
        return _named(self._role, (await asyncio.shield(self._rewards))[order])

    def _compute(self) -> dict[int, list[float]]:
        groups = sorted(self._samples.items())
        rewards = iter(self._last_scores(self._role, [one for _, samples in groups for one in samples]).tolist())
        return {order: [next(rewards) for _ in samples] for order, samples in groups}


class ServerScorer(_ModelScorer):
    """Gives each episode what a reward model on a server says of it after its last token, as `RankScorer` does. A
    resume, and later steps, take answers from the cache."""

    uses_ranks = False
    wants_groups = False

    def __init__(self, name: str, server: ModelServer, cache: RewardCache):
        self._name = name
        self._server = server
        self._cache = cache

    @contextlib.asynccontextmanager
    async def open(self, purpose: str, groups: int, on_ranks: OnRanks) -> AsyncIterator[Scoring]:
        yield self

    async def score(self, order: int, inputs: Sequence[RewardInput]) -> Scores:
        sequences = [sample.token_ids[: sample.scored_length] for sample in _last_samples(inputs)]
        return _named(self._name, await asyncio.to_thread(self._compute, sequences))

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
