"""The rewards of one source's episodes, which lie between those of other sources."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from trainer.config import Config, EnvironmentConfig
from trainer.data.datasets import Prompt
from trainer.environments.episode_runner import RolloutRequest
from trainer.episodes import Episode, Sample
from trainer.generation.engine import Sampling
from trainer.process import time_limits
from trainer.rewards.scorer import RankScorer, _RankScoring
from trainer.sources.routes import Route
from trainer.sources.scored_part import ScoredPart, by_source

SAMPLING = Sampling(1.0, 1.0, -1, 4, ())


def request(source: str, group: int, number: int) -> RolloutRequest:
    return RolloutRequest(Prompt(group, (), "", "", source=source), f"{source}:{group}", 1, number, SAMPLING)


def episode(request: RolloutRequest, length: int = 1, reward: float | None = None, failure: str = "") -> Episode:
    samples = [Sample(np.zeros(length, np.int32), np.ones(length, np.float32))]
    return Episode(request.uid, request.group, samples, reward=reward, failure=failure)


REQUESTS = [request(source, group, number) for group, source in enumerate("abab") for number in range(2)]


def test_requests_are_found_by_their_sources():
    assert {source: list(some) for source, some in by_source(REQUESTS).items()} == {
        "a": [0, 1, 4, 5],
        "b": [2, 3, 6, 7],
    }


def test_a_group_is_scored_when_it_has_ended_and_gets_its_own_reward():
    asked = []

    def last_scores(role: str, samples: list[Sample]) -> np.ndarray:
        asked.append([len(sample.token_ids) for sample in samples])
        return np.array([10.0 * len(sample.token_ids) for sample in samples])

    route = Route(Config(), None, RankScorer("judge", last_scores))  # type: ignore[arg-type]
    with contextlib.ExitStack() as block:
        part = ScoredPart(route, by_source(REQUESTS)["b"], 2, block, "step 1")
        ended: dict[int, Episode] = {}
        for index in (7, 0, 3, 6, 2, 1):  # the second group of the source ends first
            chunk = {index: episode(REQUESTS[index], length=index)}
            ended |= chunk
            assert part.take(chunk, ended) == {}
        assert part.finished(ended, lambda index: True) == {}
        scored = part.scores(ended, lambda: None)
    assert asked == [[2, 3, 6, 7]]
    assert {index: one.reward for index, one in scored.items()} == {2: 20.0, 3: 30.0, 6: 60.0, 7: 70.0}
    assert {one.source for one in scored.values()} == {"b"}


@pytest.mark.parametrize(
    ("wants_groups", "flush_s", "begun"),
    [(False, 0.0, [[5], [1, 4], [0]]), (False, 60.0, [[4, 5], [0, 1]]), (True, 0.0, [[4, 5], [0, 1]])],
    ids=["one by one", "soon after one another", "groups"],
)
def test_rewards_begin_when_what_they_need_has_ended(monkeypatch, wants_groups, flush_s, begun):
    """What ends together begins in one call, but each group in its own: a server gets them in one request."""
    monkeypatch.setattr(time_limits, "JOURNAL_FLUSH_S", flush_s)
    asked: list[list[int]] = []

    class Session(_RankScoring):
        def add(self, first, inputs):
            asked.append([len(one.episode.samples[0].token_ids) for one in inputs])
            super().add(first, inputs)

    class Scorer(RankScorer):
        @contextlib.contextmanager
        def scoring(self, n, purpose):
            yield Session(self._role, self._last_scores)

    def last_scores(role: str, samples: list[Sample]) -> np.ndarray:
        return np.array([10.0 * len(sample.token_ids) for sample in samples])

    scorer = Scorer("judge", last_scores)
    scorer.wants_groups = wants_groups
    route = Route(Config(), None, scorer)  # type: ignore[arg-type]
    with contextlib.ExitStack() as block:
        part = ScoredPart(route, by_source(REQUESTS)["a"], 2, block, "step 1")
        ended: dict[int, Episode] = {}
        for indices in ((5,), (4, 1), (0,)):
            chunk = {index: episode(REQUESTS[index], length=index) for index in indices}
            ended |= chunk
            part.take(chunk, ended)
        scored = part.scores(ended, lambda: None)
    assert asked == begun
    assert {index: one.reward for index, one in scored.items()} == {0: 0.0, 1: 10.0, 4: 40.0, 5: 50.0}


@pytest.mark.parametrize("n", [1, 2])
def test_groups_that_end_together_are_scored_in_a_call_each(n):
    """A server gets up to `reward.remote.completions_per_request` of one group, however many end at the same time."""
    asked: list[tuple[int, int]] = []

    class Session(_RankScoring):
        def add(self, first, inputs):
            asked.append((first, len(inputs)))
            super().add(first, inputs)

    class Scorer(RankScorer):
        @contextlib.contextmanager
        def scoring(self, n, purpose):
            yield Session(self._role, self._last_scores)

    route = Route(Config(), None, Scorer("judge", lambda role, samples: np.zeros(len(samples))))  # type: ignore[arg-type]
    with contextlib.ExitStack() as block:
        requests = {i: request("a", i // n, i % n) for i in range(4)}
        part = ScoredPart(route, requests, n, block, "step 1")
        ended = {index: episode(one) for index, one in requests.items()}
        part.take(ended, ended)
        part.scores(ended, lambda: None)
    assert asked == [(first, n) for first in range(0, 4, n)]


def test_without_a_scorer_the_environment_has_given_the_reward():
    cfg = Config(environment=EnvironmentConfig(name="a:B"))
    with contextlib.ExitStack() as block:
        part = ScoredPart(Route(cfg, None, None), by_source(REQUESTS)["a"], 2, block, "step 1")  # type: ignore[arg-type]
        chunk = {
            0: episode(REQUESTS[0], reward=2.0),
            1: episode(REQUESTS[1], reward=None, failure="broke"),
            2: episode(REQUESTS[2], reward=1.0),
        }
        known = part.take(chunk, chunk)
    assert {index: (one.reward, one.failure) for index, one in known.items()} == {0: (2.0, ""), 1: (None, "broke")}
    cfg.environment.on_failure = "zero"
    assert part.take(chunk, chunk)[1].reward == 0.0
