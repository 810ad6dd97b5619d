"""Run episodes and score them: engines, environments and a scorer behind one call."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

from trainer.config import Config
from trainer.environments.episode_runner import EpisodeRunner, Generation, RolloutRequest
from trainer.episodes import Episode
from trainer.generation.engine import Completion, Request, Sampling
from trainer.generation.engine_pool import EnginePool
from trainer.generation.request_stream import RequestStream
from trainer.journal.journal import Journal
from trainer.process import time_limits
from trainer.process.signals import SIGNALS
from trainer.sources.ahead import BatchProgress
from trainer.sources.error_rate import SourceFailures, error_limit, judge_failures
from trainer.sources.joined_rounds import RunnerPart, run_together
from trainer.sources.recorded import RecordedEpisodes
from trainer.sources.routes import Route
from trainer.sources.scored_part import ScoredPart, by_source


class _Here(threading.local):
    block: contextlib.ExitStack | None = None
    """The block of `RolloutRunner.awake` in this thread, until the engines are awake."""


class _Generation:
    """How the engines complete the requests of one call of `RolloutRunner.run`. See `Generation`.

    Args:
        stream: begins requests, and yields their completions.
        is_last: the batch needs no more episodes than those of this call.
    """

    def __init__(
        self,
        runner: RolloutRunner,
        progress: BatchProgress,
        stream: Callable[[Sequence[Request]], Iterator[dict[int, Completion]]],
        is_last: bool,
    ):
        self._runner = runner
        self._progress = progress
        self._stream = stream
        self._is_last = is_last

    def __call__(self, requests: Sequence[Request]) -> Iterator[dict[int, Completion]]:
        self._runner.wake()
        with self._runner.turn(self._progress), contextlib.closing(self._stream(requests)) as chunks:
            while True:
                with self._progress.timer("rollout"):
                    chunk = next(chunks, None)
                self._progress.check()
                if chunk is None:
                    return
                yield chunk

    def open_stream(self) -> RequestStream:
        self._runner.wake()
        return self._runner.engines.open_stream()

    def end_requests(self) -> None:
        if self._is_last:
            self._progress.mark_generated()

    @property
    def paused_s(self) -> float:
        return self._runner.engines.pauses.seconds


class RolloutRunner:
    """Runs episodes and scores them, for several threads at the same time. A context manager.

    Args:
        stop_tokens: end a completion.
        routes: how episodes are run and rewarded, by the sources of their prompts.
        journal: has the episodes that were run before a kill, and gets the others.
    """

    def __init__(
        self,
        cfg: Config,
        engines: EnginePool,
        tokenizer: Any,
        stop_tokens: tuple[int, ...],
        routes: Mapping[str, Route],
        journal: Journal,
    ):
        self.cfg = cfg
        self.journal = journal
        self.engines = engines
        self.largest_reward = -math.inf
        """Of all episodes so far."""
        self._stop_tokens = stop_tokens
        self.routes = routes
        self._lock = threading.Lock()
        self._counting = threading.Lock()
        self._generating = 0  # the thread that has the lock
        self._here = _Here()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            runners = {id(route.episodes): route.episodes for route in self.routes.values()}
            scorers = {id(route.scorer): route.scorer for route in self.routes.values() if route.scorer is not None}
            for process in (*runners.values(), *scorers.values()):
                stack.enter_context(process)
            self._processes = stack.pop_all()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._processes.close()

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Keep the engines awake in the block, from the first completion on that is generated.

        But not between calls of `run` if the scorer needs their GPUs.
        """
        scorers = [route.scorer for route in self.routes.values() if route.scorer is not None]
        needs_gpus = any(scorer.uses_ranks for scorer in scorers)
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
        if progress is None:
            progress = BatchProgress(requests[0].step, requests[0].step, None)
            decides = self.routes[requests[0].prompt.source].decides
            recorded = RecordedEpisodes(self.journal, requests, None, decides, self._are_single)
        else:
            recorded = progress.records(self.journal, requests, self._are_single)
        made = self._run(recorded, purpose, progress, is_last) if recorded.missing else []
        episodes = recorded.keep_rest(made)
        self.note_rewards(episodes)
        return episodes

    def _are_single(self, source: str) -> bool:
        return not self.routes[source].wants_groups

    def note_rewards(self, episodes: Sequence[Episode]) -> None:
        """Let these episodes count in `largest_reward`."""
        rewards = [episode.reward for episode in episodes if episode.reward is not None]
        with self._counting:
            self.largest_reward = max([self.largest_reward, *rewards])

    def _run(self, recorded: RecordedEpisodes, purpose: str, progress: BatchProgress, is_last: bool) -> list[Episode]:
        """Run episodes, and score those that have ended while others are generated."""
        ended: dict[int, Episode] = {}
        rewarded: dict[int, Episode] = {}
        with contextlib.closing(self._ended(recorded, progress, is_last)) as chunks, contextlib.ExitStack() as block:
            parts = [
                ScoredPart(self.routes[source], requests, recorded.size_of_groups, block, purpose)
                for source, requests in by_source(recorded.missing).items()
            ]
            looked = time.monotonic()

            def keep() -> None:
                nonlocal looked
                progress.check()
                if time.monotonic() - looked > time_limits.JOURNAL_FLUSH_S:
                    looked = time.monotonic()
                    known = {
                        i: episode for part in parts for i, episode in part.finished(ended, recorded.lacks).items()
                    }
                    recorded.keep(known)

            for chunk in chunks:
                ended |= chunk
                own = {i: episode for part in parts for i, episode in part.take(chunk, ended).items()}
                recorded.keep(own)
                rewarded |= own
                keep()
            for part in parts:
                if part.session is not None:
                    with progress.timer("reward"):
                        rewarded |= part.scores(ended, keep)
            recorded.keep(rewarded)  # also if too many others have failed
            if recorded.are_failures_judged:
                judge_failures(self._failures(recorded, rewarded), purpose)
                for part in parts:
                    part.accept()
        return [rewarded[index] for index in range(len(recorded.missing))]

    def _failures(self, recorded: RecordedEpisodes, episodes: Mapping[int, Episode]) -> list[SourceFailures]:
        """Return what has failed of each source with rewards.

        Args:
            episodes: those of `recorded.missing`.
        """
        reasons: dict[str, list[str]] = {}
        for index, request in enumerate(recorded.missing):
            reasons.setdefault(request.prompt.source, []).append(episodes[index].failure)
        totals = Counter(request.prompt.source for request in recorded.requests)
        return [
            SourceFailures(source, self.routes[source].cfg, reasons.get(source, ()), total)
            for source, total in totals.items()
            if self.routes[source].has_rewards
        ]

    def _ended(
        self, recorded: RecordedEpisodes, progress: BatchProgress, is_last: bool
    ) -> Iterator[dict[int, Episode]]:
        """Yield the missing episodes as they end, by their indices in `missing`."""
        is_partial = 0 < len(recorded.missing) < len(recorded.requests)
        needs_company = is_partial and self.engines.needs_company
        requests = recorded.missing
        # Rewards that become known while no completion does are recorded, too.
        stream = functools.partial(self.engines.stream, idle_s=time_limits.JOURNAL_FLUSH_S)
        if needs_company:
            requests = recorded.requests
            turns = any(self.routes[request.prompt.source].cfg.environment.name for request in requests)
            # All run again where each turn's company depends on those before it, or an engine has one batch of all.
            if not (turns or self.cfg.engine.streaming):
                stream = functools.partial(stream, wanted=recorded.missing_indices)

        generate = _Generation(self, progress, stream, is_last)
        chunks = self._run_episodes(recorded, requests, generate, progress)
        if needs_company:
            chunks = _chosen(chunks, recorded.missing_indices)
        yield from chunks
        generate.end_requests()

    def _run_episodes(
        self,
        recorded: RecordedEpisodes,
        requests: Sequence[RolloutRequest],
        generate: Generation,
        progress: BatchProgress,
    ) -> Iterator[dict[int, Episode]]:
        """Yield the episodes of these requests as they end. Several runners share the rounds."""
        by_runner: dict[EpisodeRunner, list[int]] = {}
        for index, request in enumerate(requests):
            by_runner.setdefault(self.routes[request.prompt.source].episodes, []).append(index)
        limits = {source: error_limit(route.cfg) for source, route in self.routes.items()}
        totals = Counter(limits[request.prompt.source] for request in recorded.requests)
        parts = []
        for runner, indices in by_runner.items():
            limit = limits[requests[indices[0]].prompt.source]
            known = totals[limit] - len(indices) if recorded.are_failures_judged else None
            parts.append(RunnerPart(runner, [requests[index] for index in indices], indices, known))
        if len(parts) == 1:
            yield from parts[0].episodes.run(requests, generate, progress.timer, parts[0].known, progress.check)
            return
        # The threads of streams may neither wake engines nor begin a start that was deferred.
        with self.engines.awake() if self.cfg.streams_requests else contextlib.nullcontext():
            yield from run_together(parts, generate, progress.timer, progress.check)

    def wake(self) -> None:
        """Wake the engines for the block of `awake` in this thread, if they are not awake for it."""
        block, self._here.block = self._here.block, None
        if block is not None:
            block.enter_context(self.engines.awake())

    @contextlib.contextmanager
    def turn(self, progress: BatchProgress) -> Iterator[None]:
        """Let one thread at a time generate, if the company of a request may change its last bits.

        Engines that take requests while they generate run those of several threads together. Which ones would depend on
        time, and so would the bits of their log-probs, in runs that are to be exact. With `environment.schedule=stream`
        requests join others at any time, and an engine either allows for that, or the run is not compared bit for bit.
        """
        is_exact = self.engines.repeats and not self.cfg.rollout.in_flight_updates
        if self.cfg.streams_requests or not (self.cfg.engine.streaming and is_exact):
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

    def sampling(self, temperature: float, top_p: float, top_k: int) -> Sampling:
        return Sampling(temperature, top_p, top_k, self.cfg.rollout.max_response_tokens, self._stop_tokens)

    def greedy(self) -> Sampling:
        return self.sampling(0.0, 1.0, -1)


def _chosen(chunks: Iterator[dict[int, Episode]], chosen: Sequence[int]) -> Iterator[dict[int, Episode]]:
    """Yield the episodes with these indices, by their positions in `chosen`."""
    positions = {index: position for position, index in enumerate(chosen)}
    with contextlib.closing(chunks):
        for chunk in chunks:
            yield {positions[index]: episode for index, episode in chunk.items() if index in positions}
