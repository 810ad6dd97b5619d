"""Runners of several sources share the rounds of the engines."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pytest

from trainer.data.datasets import Prompt
from trainer.environments.episode_runner import EpisodeRunner, RolloutRequest
from trainer.episodes import Episode, Sample
from trainer.errors import UserError
from trainer.generation.engine import Completion, Request, Sampling
from trainer.generation.request_stream import RequestStream
from trainer.sources.joined_rounds import RunnerPart, run_together

SAMPLING = Sampling(1.0, 1.0, -1, 4, ())


class Turns(EpisodeRunner):
    """Episode i has as many turns as its row says; between two of them the runner waits."""

    def __init__(self, pause_s: float = 0.0, fails_after: int | None = None):
        self.pause_s, self.fails_after = pause_s, fails_after
        self.was_closed = threading.Event()

    def run(self, requests, generate, timer, known=0, check=lambda: None) -> Iterator[dict[int, Episode]]:
        try:
            turn = 0
            while left := [i for i, request in enumerate(requests) if request.prompt.row["turns"] > turn]:
                if turn == self.fails_after:
                    raise UserError("too many have failed")
                time.sleep(self.pause_s)
                asked = [Request([requests[i].prompt.index, turn], 0, SAMPLING) for i in left]
                replies = {i: reply for chunk in generate(asked) for i, reply in chunk.items()}
                assert [replies[i].token_ids[0] for i in range(len(left))] == [requests[i].prompt.index for i in left]
                turn += 1
                yield {i: episode_of(requests[i]) for i in left if requests[i].prompt.row["turns"] == turn}
        finally:
            self.was_closed.set()


def episode_of(request: RolloutRequest) -> Episode:
    return Episode(request.uid, request.group, [Sample(np.zeros(1, np.int32), np.ones(1, np.float32))])


class Engines:
    """Answer a request with its first token, the last request of a round first."""

    def __init__(self, breaks_in: int | None = None):
        self.rounds: list[list[tuple[int, int]]] = []
        self.threads: set[int] = set()
        self.ended = 0
        self._breaks_in = breaks_in

    def __call__(self, requests: Sequence[Request]) -> Iterator[dict[int, Completion]]:
        self.threads.add(threading.get_ident())
        if len(self.rounds) == self._breaks_in:
            raise RuntimeError("all engines are lost")
        self.rounds.append([tuple(request.prompt_token_ids) for request in requests])
        for place in reversed(range(len(requests))):
            yield {place: answer_to(requests[place])}

    paused_s = 0.0

    def end_requests(self) -> None:
        self.ended += 1

    def open_stream(self) -> RequestStream:
        return RequestStream(self, threading.RLock(), contextlib.ExitStack(), is_open=True)

    def submit(self, stream: RequestStream, requests: Mapping[int, Request]) -> None:
        self.threads.add(threading.get_ident())
        stream.complete |= {key: answer_to(request) for key, request in requests.items()}

    def next_chunk(self, stream: RequestStream) -> dict[int, Completion]:
        with stream.ready:
            stream.ready.wait_for(lambda: stream.complete or stream.is_woken)
            chunk, stream.complete = stream.complete, {}
            return chunk

    def drop(self, stream: RequestStream) -> None:
        pass


def answer_to(request: Request) -> Completion:
    return Completion([request.prompt_token_ids[0]], [0.0], "stop", 1)


class Streaming(EpisodeRunner):
    """Gets its completions by a stream, which it never leaves by itself with `is_endless`."""

    def __init__(self, is_endless: bool = False):
        self.is_endless = is_endless
        self.has_ended = threading.Event()

    def run(self, requests, generate, timer, known=0, check=lambda: None) -> Iterator[dict[int, Episode]]:
        try:
            with generate.open_stream() as stream:
                for index, request in enumerate(requests):
                    stream.submit({index: Request([request.prompt.index, 0], 0, SAMPLING)})
                    yield {index: episode_of(requests[index]) for index in next(stream)}
                while self.is_endless:
                    check()
                    next(stream)
        finally:
            self.has_ended.set()


def part(runner: EpisodeRunner, turns: dict[int, int]) -> RunnerPart:
    """The part with these places in the batch, and so many turns each."""
    requests = [
        RolloutRequest(Prompt(place, (), "", "", {"turns": count}), f"0:{place}", 1, 0, SAMPLING)
        for place, count in turns.items()
    ]
    return RunnerPart(runner, requests, list(turns), 0)


def together(engines: Engines, *parts: RunnerPart, check=lambda: None) -> list[dict[int, Episode]]:
    chunks = run_together(parts, engines, lambda phase: contextlib.nullcontext(), check)
    return [chunk for chunk in chunks if chunk]


def test_rounds_hold_the_requests_of_all_runners_whoever_is_late():
    """A single turn beside episodes of three turns, and others of two. All requests of a round come together."""
    rounds = []
    for pauses in ((0.0, 0.0, 0.05), (0.05, 0.02, 0.0)):
        engines = Engines()
        parts = [
            part(Turns(pauses[0]), {0: 1, 3: 1}),
            part(Turns(pauses[1]), {1: 3, 4: 1}),
            part(Turns(pauses[2]), {2: 2}),
        ]
        episodes = {place: one for chunk in together(engines, *parts) for place, one in chunk.items()}
        assert sorted(episodes) == [0, 1, 2, 3, 4]
        assert [episodes[place].group for place in range(5)] == [f"0:{place}" for place in range(5)]
        assert engines.threads == {threading.get_ident()}
        rounds.append(engines.rounds)
    assert rounds[0] == rounds[1] == [[(0, 0), (3, 0), (1, 0), (4, 0), (2, 0)], [(1, 1), (2, 1)], [(1, 2)]]


class Once(EpisodeRunner):
    """Asks once, and ends when `may_end` is set."""

    def __init__(self) -> None:
        self.may_end = threading.Event()

    def run(self, requests, generate, timer, known=0, check=lambda: None) -> Iterator[dict[int, Episode]]:
        for _ in generate([Request([0, 0], 0, SAMPLING)]):
            generate.end_requests()
        assert self.may_end.wait(60)
        yield {0: episode_of(requests[0])}


def test_requests_have_ended_when_no_runner_asks_again():
    """Those of one that says nothing have when it has ended."""
    runners = Once(), Once()

    class Watching(Engines):
        def end_requests(self) -> None:
            super().end_requests()
            for runner in runners:
                runner.may_end.set()

    engines = Watching()
    together(engines, part(runners[0], {0: 1}), part(runners[1], {1: 1}), part(Turns(), {2: 3}))
    assert engines.ended and len(engines.rounds) == 3


def test_episodes_are_there_as_soon_as_they_have_ended():
    engines = Engines()
    chunks = run_together(
        [part(Turns(), {0: 1}), part(Turns(), {1: 3})], engines, lambda phase: contextlib.nullcontext(), lambda: None
    )
    assert list(next(filter(None, chunks))) == [0]
    assert len(engines.rounds) < 3
    assert [list(chunk) for chunk in chunks if chunk] == [[1]]


@pytest.mark.parametrize("fails_after", [0, 1, 2])
def test_the_error_of_one_runner_ends_all(fails_after):
    slow, failing = Turns(), Turns(fails_after=fails_after)
    with pytest.raises(UserError, match="too many have failed"):
        together(Engines(), part(slow, {0: 50}), part(failing, {1: 3}))
    assert slow.was_closed.wait(60) and failing.was_closed.wait(60)


def test_an_error_of_the_engines_ends_all_runners():
    runners = Turns(), Turns()
    with pytest.raises(RuntimeError, match="all engines are lost"):
        together(Engines(breaks_in=1), part(runners[0], {0: 3}), part(runners[1], {1: 3}))
    assert all(runner.was_closed.wait(60) for runner in runners)


def test_a_batch_that_is_not_needed_any_more_ends_while_runners_are_busy():
    class NotNeeded(Exception):
        pass

    runners = Turns(pause_s=0.5), Turns()

    def check() -> None:
        raise NotNeeded

    with pytest.raises(NotNeeded):
        together(Engines(), part(runners[0], {0: 3}), part(runners[1], {1: 3}), check=check)
    assert all(runner.was_closed.wait(60) for runner in runners)


def test_runners_end_if_nobody_reads_on():
    runners = Turns(), Turns()
    chunks = run_together(
        [part(runners[0], {0: 1}), part(runners[1], {1: 9})],
        Engines(),
        lambda phase: contextlib.nullcontext(),
        lambda: None,
    )
    next(filter(None, chunks))
    chunks.close()
    assert all(runner.was_closed.wait(60) for runner in runners)


def test_a_runner_with_a_stream_takes_part_in_no_round():
    """It waits for no other, and no round waits for it."""
    engines = Engines()
    parts = part(Turns(pause_s=0.02), {0: 2, 3: 1}), part(Streaming(), {1: 1, 2: 1})
    episodes = {place: one for chunk in together(engines, *parts) for place, one in chunk.items()}
    assert [episodes[place].group for place in range(4)] == [f"0:{place}" for place in range(4)]
    assert engines.rounds == [[(0, 0), (3, 0)], [(0, 1)]] and len(engines.threads) == 2


def test_a_runner_that_reads_a_stream_ends_with_the_others():
    streaming, failing = Streaming(is_endless=True), Turns(pause_s=0.1, fails_after=1)
    with pytest.raises(UserError, match="too many have failed"):
        together(Engines(), part(streaming, {0: 1}), part(failing, {1: 3}))
    assert streaming.has_ended.wait(60)
