"""Run episodes and score them: engines, environments and a scorer behind one call."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Self

from trainer.config import Config
from trainer.environments.episode_runner import (
    EnvironmentRunner,
    EpisodeRunner,
    PhaseTimer,
    RolloutRequest,
    SingleTurnRunner,
    report_failures,
)
from trainer.episodes import Episode
from trainer.generation.engine import Completion, Request, Sampling
from trainer.generation.engine_pool import EnginePool
from trainer.rewards.scorer import Scorer
from trainer.rewards.scores import Scores
from trainer.rewards.terms import RewardInput


class RolloutRunner:
    """Runs episodes and scores them. A context manager.

    Args:
        stop_tokens: end a completion.
        scorer: gives the rewards. None: the environment gives them.
    """

    def __init__(
        self, cfg: Config, engines: EnginePool, tokenizer: Any, stop_tokens: tuple[int, ...], scorer: Scorer | None
    ):
        self.cfg = cfg
        self.engines = engines
        self.largest_reward = -math.inf
        """Of all episodes so far."""
        self._stop_tokens = stop_tokens
        self._episodes: EpisodeRunner = (EnvironmentRunner if cfg.environment.name else SingleTurnRunner)(
            cfg, tokenizer
        )
        self._scorer = scorer

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._episodes)
            if self._scorer is not None:
                stack.enter_context(self._scorer)
            self._processes = stack.pop_all()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._processes.close()

    def awake(self) -> AbstractContextManager[None]:
        """Keep the engines awake between the calls of `run` in the block, unless the scorer needs their GPUs."""
        needs_gpus = self._scorer is not None and self._scorer.uses_ranks
        return contextlib.nullcontext() if needs_gpus else self.engines.awake()

    def run(
        self,
        requests: Sequence[RolloutRequest],
        purpose: str,
        timer: PhaseTimer = contextlib.nullcontext,
    ) -> list[Episode]:
        """Run episodes, and score those that have ended while others are generated.

        Args:
            requests: the same number for each group, those of one group together.
            purpose: names what the episodes are for, in messages.
            timer: of the step. Evaluation is not timed.
        """

        def generate(prompts: Sequence[Request]) -> Iterator[dict[int, Completion]]:
            chunks = self.engines.stream(prompts)
            while True:
                with timer("rollout"):
                    chunk = next(chunks, None)
                if chunk is None:
                    return
                yield chunk

        chunks = self._episodes.run(requests, generate, timer)
        if self._scorer is None:
            ended = {index: episode for chunk in chunks for index, episode in chunk.items()}
            episodes = [ended[index] for index in range(len(requests))]
            scores = _environment_scores(episodes, self.cfg.environment.on_failure, purpose)
        else:
            episodes, scores = self._score(requests, chunks, purpose, timer)
        leaves_out = self.cfg.on_failure == "leave_out"
        scored = [
            dataclasses.replace(
                episode, reward=None if reason and leaves_out else reward, rewards=terms, failure=reason
            )
            for episode, reward, terms, reason in zip(
                episodes, scores.rewards, scores.terms, scores.reasons, strict=True
            )
        ]
        rewards = [episode.reward for episode in scored if episode.reward is not None]
        self.largest_reward = max([self.largest_reward, *rewards])
        return scored

    def _score(
        self,
        requests: Sequence[RolloutRequest],
        chunks: Iterator[Mapping[int, Episode]],
        purpose: str,
        timer: PhaseTimer,
    ) -> tuple[list[Episode], Scores]:
        """Compute the rewards of each group as soon as its episodes have ended."""
        assert self._scorer is not None
        n = len(requests) // len({request.group for request in requests})
        ended: dict[int, Episode] = {}
        with self._scorer.scoring(n, purpose) as session:
            for chunk in chunks:
                ended |= chunk
                for group in sorted({index // n for index in chunk}):
                    indices = range(group * n, group * n + n)
                    if all(index in ended for index in indices):
                        session.add(indices.start, [_reward_input(requests[index], ended[index]) for index in indices])
            with timer("reward"):
                scores = session.scores()
        return [ended[index] for index in range(len(requests))], scores

    def sampling(self, temperature: float, top_p: float, top_k: int) -> Sampling:
        return Sampling(temperature, top_p, top_k, self.cfg.rollout.max_response_tokens, self._stop_tokens)

    def greedy(self) -> Sampling:
        return self.sampling(0.0, 1.0, -1)


def means(name: str, values: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the metrics `{name}/{term}/mean`. A term that one of the values lacks counts as 0 there."""
    terms = sorted({term for value in values for term in value})
    return {f"{name}/{term}/mean": sum(value.get(term, 0.0) for value in values) / len(values) for term in terms}


def reward_terms(episodes: Sequence[Episode]) -> list[Mapping[str, float]]:
    """Return the terms of the rewards that are not left out."""
    return [episode.rewards for episode in episodes if episode.reward is not None]


def _environment_scores(episodes: Sequence[Episode], on_failure: str, purpose: str) -> Scores:
    """Return the rewards that environments gave."""
    rewards = [episode.reward or 0.0 for episode in episodes]
    reasons = [episode.failure for episode in episodes]
    failures = report_failures(episodes, on_failure, purpose)
    return Scores(rewards, [dict(episode.rewards) for episode in episodes], reasons, failures)


def _reward_input(request: RolloutRequest, episode: Episode) -> RewardInput:
    """Return an episode as a scorer gets it."""
    prompt = request.prompt
    return RewardInput(episode.text, prompt.answer, prompt.text, episode.messages, prompt.row, episode.status, episode)
