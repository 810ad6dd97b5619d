"""Run episodes of which none waits for another: each goes on as soon as its environment has answered."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable, Iterator, Mapping, Sequence

from trainer.environments.episode_runner import Clock, EnvironmentRunner, Generation, PhaseTimer, RunningEpisode
from trainer.episodes import Episode
from trainer.generation.engine import Completion, Request
from trainer.process import time_limits


class StreamRunner(EnvironmentRunner):
    """Runs episodes as an `EnvironmentRunner` does, but not in rounds (`environment.schedule=stream`).

    When an environment has answered, the next reply is asked for at once: the request joins those that the engines
    generate. An episode that has ended is yielded at once, and its environment is closed while other episodes run.
    """

    def _run(
        self,
        episodes: Sequence[RunningEpisode],
        generate: Generation,
        clock: Clock,
        timer: PhaseTimer,
        known: int | None,
        check: Callable[[], None],
    ) -> Iterator[dict[int, Episode]]:
        answered: queue.SimpleQueue[RunningEpisode] = queue.SimpleQueue()
        with contextlib.ExitStack() as asking, self._pool.round() as calls:
            stream = asking.enter_context(generate.open_stream())

            def note(episode: RunningEpisode) -> None:
                answered.put(episode)
                stream.wake()

            for episode in episodes:
                episode.on_rest = note
            calls.ended.add_done_callback(lambda _: stream.wake())  # the processes may be unable to start
            calls.submit(episodes)
            left, needs_replies = len(episodes), True
            while left:
                check()
                calls.check()
                if needs_replies:
                    with timer("environment" if stream.is_idle else "rollout"):
                        completions = next(stream)
                    if completions:
                        calls.submit(self._take_replies(episodes, completions))
                else:
                    with timer("environment"), contextlib.suppress(queue.Empty):
                        answered.put(answered.get(timeout=time_limits.POLL_INTERVAL_S))
                asked, ended = self._go_on(answered, clock)
                if needs_replies and not any(one.needs_reply(self._config.max_turns) for one in episodes):
                    needs_replies = False
                    asking.close()  # the engines may get new weights now, which end streams
                    generate.end_requests()
                if asked:
                    stream.submit(asked)
                if ended:
                    left -= len(ended)
                    calls.submit(ended)  # closes the environments
                    if any(episode.failure for episode in ended):
                        self._check_failures(episodes, known)
                    yield from self._newly_ended(ended)
            with timer("environment"):
                calls.wait(check)
                self._pool.step_all(episodes, check)  # closes what could not be closed meanwhile

    def _take_replies(
        self, episodes: Sequence[RunningEpisode], completions: Mapping[int, Completion]
    ) -> list[RunningEpisode]:
        """Give completions to their episodes; return these: their environments are to answer."""
        with self._lock:
            for index, completion in completions.items():
                episodes[index].take_reply(completion)
                episodes[index].is_answered = False
        return [episodes[index] for index in completions]

    def _go_on(
        self, answered: queue.SimpleQueue[RunningEpisode], clock: Clock
    ) -> tuple[dict[int, Request], list[RunningEpisode]]:
        """Continue the episodes whose environments have answered. Return the next requests, and what has ended."""
        asked, ended = {}, []
        with self._lock, contextlib.suppress(queue.Empty):
            while True:
                episode = answered.get_nowait()
                if episode.is_answered:  # it has only been closed
                    continue
                episode.is_answered = True
                self._continue(episode, clock)
                if episode.ended:
                    ended.append(episode)
                else:
                    asked[episode.index] = self._next_request(episode)
        return asked, ended
