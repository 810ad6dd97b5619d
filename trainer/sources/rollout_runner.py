"""Run episodes and score them: engines, environments and a scorer behind one call."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np

from trainer.config import Config
from trainer.environments.episode_runner import (
    EnvironmentRunner,
    EpisodeRunner,
    RolloutRequest,
    SingleTurnRunner,
    report_failures,
)
from trainer.episodes import Episode
from trainer.generation.engine import Completion, Request, Sampling
from trainer.generation.engine_pool import EnginePool
from trainer.journal.journal import Journal
from trainer.process import time_limits
from trainer.process.signals import SIGNALS
from trainer.rewards.scorer import Scorer
from trainer.rewards.terms import RewardInput
from trainer.sources.ahead import BatchProgress
from trainer.sources.recorded import RecordedGroups


class _Here(threading.local):
    block: contextlib.ExitStack | None = None
    """The block of `RolloutRunner.awake` in this thread, until the engines are awake."""


class RolloutRunner:
    """Runs episodes and scores them, for several threads at the same time. A context manager.

    Args:
        stop_tokens: end a completion.
        scorer: gives the rewards. None: the environment gives them, or all are 0.
        journal: has the episodes that were run before a kill, and gets the others.
    """

    def __init__(
        self,
        cfg: Config,
        engines: EnginePool,
        tokenizer: Any,
        stop_tokens: tuple[int, ...],
        scorer: Scorer | None,
        journal: Journal,
    ):
        self.cfg = cfg
        self.journal = journal
        self.engines = engines
        self.largest_reward = -math.inf
        """Of all episodes so far."""
        self._stop_tokens = stop_tokens
        self._episodes: EpisodeRunner = (EnvironmentRunner if cfg.environment.name else SingleTurnRunner)(
            cfg, tokenizer
        )
        self._scorer = scorer
        self._lock = threading.Lock()
        self._counting = threading.Lock()
        self._generating = 0  # the thread that has the lock
        self._here = _Here()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._episodes)
            if self._scorer is not None:
                stack.enter_context(self._scorer)
            self._processes = stack.pop_all()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._processes.close()

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Keep the engines awake in the block, from the first completion on that is generated.

        But not between calls of `run` if the scorer needs their GPUs.
        """
        needs_gpus = self._scorer is not None and self._scorer.uses_ranks
        with contextlib.ExitStack() as block:
            self._here.block = None if needs_gpus else block
            try:
                yield
            finally:
                self._here.block = None

    def run(
        self,
        requests: Sequence[RolloutRequest],
        purpose: str,
        progress: BatchProgress | None = None,
        is_last: bool = False,
    ) -> list[Episode]:
        """Return episodes with their rewards: those that the journal has, and those that are run now.

        Args:
            requests: the same number for each group, those of one group together.
            purpose: names what the episodes are for, in messages.
            progress: of the batch that they are for. None: of an evaluation, which is not timed.
            is_last: the batch needs no more episodes than these.
        """
        progress = progress or BatchProgress(requests[0].step, requests[0].step, None)
        recorded = progress.records(self.journal, requests)
        made = self._run(recorded, purpose, progress, is_last) if recorded.missing else []
        episodes = recorded.keep_rest(made)
        self.note_rewards(episodes)
        return episodes

    def note_rewards(self, episodes: Sequence[Episode]) -> None:
        """Let these episodes count in `largest_reward`."""
        rewards = [episode.reward for episode in episodes if episode.reward is not None]
        with self._counting:
            self.largest_reward = max([self.largest_reward, *rewards])

    def _run(self, recorded: RecordedGroups, purpose: str, progress: BatchProgress, is_last: bool) -> list[Episode]:
        """Run episodes, and score those that have ended while others are generated."""
        with contextlib.closing(self._ended(recorded, progress, is_last)) as chunks:
            if self._scorer is not None:
                return self._score(self._scorer, recorded, chunks, purpose, progress)
            ended: dict[int, Episode] = {}
            for chunk in chunks:
                rewarded = {i: self._with_reward(episode, *_own_reward(episode)) for i, episode in chunk.items()}
                recorded.keep(rewarded)
                ended |= rewarded
        episodes = [ended[index] for index in range(len(recorded.missing))]
        if recorded.known is not None:
            report_failures(episodes, self.cfg.environment.on_failure, purpose)
        return episodes

    def _ended(self, recorded: RecordedGroups, progress: BatchProgress, is_last: bool) -> Iterator[dict[int, Episode]]:
        """Yield the missing episodes as they end, by their indices in `missing`."""
        is_partial = 0 < len(recorded.missing) < len(recorded.requests)
        needs_company = is_partial and self.engines.repeats and not self.cfg.engine.streaming
        requests, stream = recorded.missing, self.engines.stream
        if needs_company:
            requests = recorded.requests
            if not self.cfg.environment.name:  # else all run again: each turn's company depends on those before it
                stream = functools.partial(stream, wanted=recorded.missing_indices)

        def generate(prompts: Sequence[Request]) -> Iterator[dict[int, Completion]]:
            block, self._here.block = self._here.block, None
            if block is not None:
                block.enter_context(self.engines.awake())
            with self._turn(progress), contextlib.closing(stream(prompts)) as chunks:
                while True:
                    with progress.timer("rollout"):
                        chunk = next(chunks, None)
                    progress.check()
                    if chunk is None:
                        return
                    yield chunk

        known = None if recorded.known is None else len(recorded.requests) - len(requests)
        chunks = self._episodes.run(requests, generate, progress.timer, known, progress.check)
        if needs_company:
            chunks = _chosen(chunks, recorded.missing_indices)
        yield from chunks
        if is_last:
            progress.mark_generated()

    def _score(
        self,
        scorer: Scorer,
        recorded: RecordedGroups,
        chunks: Iterator[Mapping[int, Episode]],
        purpose: str,
        progress: BatchProgress,
    ) -> list[Episode]:
        """Compute the rewards of each group as soon as its episodes have ended."""
        requests, n = recorded.missing, recorded.size
        ended: dict[int, Episode] = {}
        with scorer.scoring(n, purpose, recorded.known) as session:
            looked = time.monotonic()

            def keep() -> None:
                nonlocal looked
                progress.check()
                if time.monotonic() - looked > time_limits.JOURNAL_FLUSH_S:
                    looked = time.monotonic()
                    known = session.finished().items()
                    recorded.keep({i: self._with_reward(ended[i], *result) for i, result in known if recorded.lacks(i)})

            for chunk in chunks:
                ended |= chunk
                for group in sorted({index // n for index in chunk}):
                    indices = range(group * n, group * n + n)
                    if all(index in ended for index in indices):
                        session.add(indices.start, [_reward_input(requests[index], ended[index]) for index in indices])
                keep()
            with progress.timer("reward"):
                scores = session.scores(keep)
        return [self._with_reward(ended[index], *result) for index, result in enumerate(scores.each())]

    @contextlib.contextmanager
    def _turn(self, progress: BatchProgress) -> Iterator[None]:
        """Let one thread at a time generate, if the company of a request may change its last bits.

        Engines that take requests while they generate run those of several threads together. Which ones would depend on
        time, and so would the bits of their log-probs, in runs that are to be exact.
        """
        is_exact = self.engines.repeats and not self.cfg.rollout.in_flight_updates
        if not (self.cfg.engine.streaming and is_exact):
            yield
            return
        while not self._lock.acquire(timeout=time_limits.POLL_INTERVAL_S):
            progress.check()
            SIGNALS.check_behind(self._generating)
        self._generating = threading.get_ident()
        try:
            yield
        finally:
            self._lock.release()

    def _with_reward(self, episode: Episode, reward: float, terms: Mapping[str, float], reason: str) -> Episode:
        """Return an episode with its reward. `reason`: why the reward failed, empty if it did not."""
        is_left_out = reason and self.cfg.on_failure == "leave_out"
        return dataclasses.replace(episode, reward=None if is_left_out else reward, rewards=terms, failure=reason)

    def sampling(self, temperature: float, top_p: float, top_k: int) -> Sampling:
        return Sampling(temperature, top_p, top_k, self.cfg.rollout.max_response_tokens, self._stop_tokens)

    def greedy(self) -> Sampling:
        return self.sampling(0.0, 1.0, -1)


def staleness(episodes: Sequence[Episode], step: int) -> dict[str, float]:
    """Return by how many versions the weights that sampled the episodes are older than those that the step trains."""
    samples = [sample for episode in episodes for sample in episode.samples if sample.mask.any()]
    ages = [step - sample.weight_versions[0] for sample in samples if sample.weight_versions is not None]
    return {"rollout/staleness_mean": float(np.mean(ages)), "rollout/staleness_max": float(max(ages))} if ages else {}


def mean_versions(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return how many versions of the weights have sampled an episode."""
    ranges = [sample.weight_versions for episode in episodes for sample in episode.samples if sample.mask.any()]
    counts = [newest - oldest + 1 for oldest, newest in filter(None, ranges)]
    return {"rollout/versions_mean": float(np.mean(counts))} if counts else {}


def means(name: str, values: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the metrics `{name}/{term}/mean`. A term that one of the values lacks counts as 0 there."""
    terms = sorted({term for value in values for term in value})
    return {f"{name}/{term}/mean": sum(value.get(term, 0.0) for value in values) / len(values) for term in terms}


def reward_terms(episodes: Sequence[Episode]) -> list[Mapping[str, float]]:
    """Return the terms of the rewards that are not left out."""
    return [episode.rewards for episode in episodes if episode.reward is not None]


def _chosen(chunks: Iterator[dict[int, Episode]], chosen: Sequence[int]) -> Iterator[dict[int, Episode]]:
    """Yield the episodes with these indices, by their positions in `chosen`."""
    positions = {index: position for position, index in enumerate(chosen)}
    with contextlib.closing(chunks):
        for chunk in chunks:
            yield {positions[index]: episode for index, episode in chunk.items() if index in positions}


def _own_reward(episode: Episode) -> tuple[float, dict[str, float], str]:
    """Return the reward that an environment gave, its terms, and why it failed."""
    return episode.reward or 0.0, dict(episode.rewards), episode.failure


def _reward_input(request: RolloutRequest, episode: Episode) -> RewardInput:
    """Return an episode as a scorer gets it."""
    prompt = request.prompt
    return RewardInput(episode.text, prompt.answer, prompt.text, episode.messages, prompt.row, episode.status, episode)
