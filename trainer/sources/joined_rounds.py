"""Episodes of several sources in one batch: their runners take turns with the engines in common rounds.

A round begins when each runner has asked for completions or asks for no more. So which requests are generated together
depends on the episodes alone, and never on time. A runner that opens a stream takes part in no round.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from trainer.environments.episode_runner import EpisodeRunner, Generation, PhaseTimer, RolloutRequest
from trainer.episodes import Episode
from trainer.generation.engine import Completion, Request
from trainer.generation.request_stream import RequestStream
from trainer.process import time_limits
from trainer.process.signals import SIGNALS


class _Unneeded(Exception):
    """The batch has failed, or is not needed any more."""


@dataclass
class RunnerPart:
    """The episodes of a batch that one runner runs."""

    episodes: EpisodeRunner
    requests: Sequence[RolloutRequest]
    indices: Sequence[int]
    """Indices of the requests in the batch."""
    known: int | None
    """See `EpisodeRunner.run`."""
    asked: Sequence[Request] | None = None
    """The requests that the runner waits for."""
    replies: deque[dict[int, Completion] | None] = field(default_factory=deque)
    """Completions that the runner has not taken. None: the round is over."""
    stream: RequestStream | None = None
    """The runner asks for completions by this stream."""
    needs_replies: bool = True
    """The runner may ask for more completions."""
    has_ended: bool = False
    thread: threading.Thread | None = None


def run_together(
    parts: Sequence[RunnerPart], generate: Generation, timer: PhaseTimer, check: Callable[[], None]
) -> Iterator[dict[int, Episode]]:
    """Yield the episodes of all parts as they end, by their indices in the batch. If none does, yield nothing at times.

    Args:
        generate: called on this thread alone, once a round.
        check: called again and again while this waits. It raises to end that.

    Raises:
        Exception: what a runner raises.
    """
    with contextlib.closing(_Rounds(parts, generate)) as rounds:
        while not rounds.have_ended:
            idle_at = time.monotonic() + time_limits.JOURNAL_FLUSH_S
            with timer("rollout" if rounds.has_streams else "environment"):
                while not (rounds.is_ready or rounds.ended or time.monotonic() > idle_at):
                    rounds.wait()
                    check()
            if rounds.ended or not rounds.is_ready:
                yield rounds.take_ended()
                continue
            rounds.raise_error()
            with contextlib.closing(rounds.answers()) as answers:
                for _ in answers:
                    yield rounds.take_ended()
        rounds.raise_error()


class _Rounds:
    """Runs each part on a thread of its own, and joins their requests."""

    def __init__(self, parts: Sequence[RunnerPart], generate: Generation):
        self._parts = parts
        self._generate = generate
        self._changed = threading.Condition()
        self._is_stopped = False
        self._error: BaseException | None = None
        self.ended: dict[int, Episode] = {}
        """Episodes that have ended, by their indices in the batch."""
        for number, part in enumerate(parts):
            part.thread = threading.Thread(target=self._run, args=[part], name=f"episodes {number}", daemon=True)
            part.thread.start()

    @property
    def have_ended(self) -> bool:
        with self._changed:
            return not self.ended and (self._error is not None or all(part.has_ended for part in self._parts))

    @property
    def is_ready(self) -> bool:
        """Every runner without a stream waits for completions or asks for no more, or one has failed."""
        with self._changed:
            asking = [part for part in self._parts if part.needs_replies and not part.stream]
            waiting = [part.asked is not None for part in asking]
            has_ended = all(part.has_ended for part in self._parts)
            return self._error is not None or has_ended or bool(waiting) and all(waiting)

    @property
    def has_streams(self) -> bool:
        with self._changed:
            return any(part.stream and not part.has_ended for part in self._parts)

    def take_ended(self) -> dict[int, Episode]:
        with self._changed:
            ended, self.ended = self.ended, {}
            return ended

    def raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Wait a moment for a runner. The main thread makes progress only as far as that one does."""
        with self._changed:
            busy = next((part for part in self._parts if part.asked is None and not part.has_ended), None)
            self._changed.wait(time_limits.POLL_INTERVAL_S)
        if busy is not None and busy.thread is not None:
            SIGNALS.check_behind(busy.thread.ident or 0)

    def answers(self) -> Iterator[None]:
        """Generate what the runners have asked for, and give it to them. Yields after each chunk of completions."""
        asking = [part for part in self._parts if part.asked is not None]
        requests = [request for part in asking for request in part.asked or ()]
        owners = [(number, index) for number, part in enumerate(asking) for index in range(len(part.asked or ()))]
        for part in asking:
            part.asked = None
        for chunk in self._generate(requests) if requests else ():
            replies: list[dict[int, Completion]] = [{} for _ in asking]
            for request, completion in chunk.items():
                number, index = owners[request]
                replies[number][index] = completion
            self._give(asking, replies)
            yield
        self._give(asking, [None] * len(asking))

    def _give(self, parts: Sequence[RunnerPart], replies: Sequence[dict[int, Completion] | None]) -> None:
        """Give each runner its completions, if there are some. None: the round is over."""
        with self._changed:
            for part, reply in zip(parts, replies, strict=True):
                if reply or reply is None:
                    part.replies.append(reply)
            self._changed.notify_all()

    def ask(self, part: RunnerPart, requests: Sequence[Request]) -> Iterator[dict[int, Completion]]:
        """Let the requests of a runner take part in the next round; yield their completions."""
        with self._changed:
            part.asked = requests
            self._changed.notify_all()
        while (chunk := self._next_reply(part)) is not None:
            yield chunk

    @property
    def paused_s(self) -> float:
        return self._generate.paused_s

    def end_requests(self, part: RunnerPart) -> None:
        with self._changed:
            part.needs_replies = False
            if any(one.needs_replies for one in self._parts):
                return
        self._generate.end_requests()

    def open_stream(self, part: RunnerPart) -> RequestStream:
        stream = self._generate.open_stream()
        with self._changed:
            part.stream = stream
            self._changed.notify_all()
        return stream

    def _run(self, part: RunnerPart) -> None:
        generate = _PartGeneration(self, part)
        try:
            with contextlib.closing(
                part.episodes.run(part.requests, generate, _untimed, part.known, self._check)
            ) as chunks:
                for chunk in chunks:
                    with self._changed:
                        self.ended |= {part.indices[index]: episode for index, episode in chunk.items()}
                        self._changed.notify_all()
            self.end_requests(part)
        except _Unneeded:
            pass
        except BaseException as error:  # the thread that generates raises it
            with self._changed:
                self._error = self._error or error
        with self._changed:
            part.has_ended = True
            self._changed.notify_all()

    def _next_reply(self, part: RunnerPart) -> dict[int, Completion] | None:
        with self._changed:
            while not part.replies:
                self._check()
                self._changed.wait(time_limits.POLL_INTERVAL_S)
            return part.replies.popleft()

    def _check(self) -> None:
        SIGNALS.check()
        if self._is_stopped:
            raise _Unneeded

    def close(self) -> None:
        """End the threads."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()
        for part in self._parts:
            if part.stream is not None:
                part.stream.wake()
            assert part.thread is not None
            part.thread.join(time_limits.BATCH_END_S)


class _PartGeneration:
    """See `Generation`: that of one runner."""

    def __init__(self, rounds: _Rounds, part: RunnerPart):
        self._rounds = rounds
        self._part = part

    def __call__(self, requests: Sequence[Request]) -> Iterator[dict[int, Completion]]:
        return self._rounds.ask(self._part, requests)

    def open_stream(self) -> RequestStream:
        return self._rounds.open_stream(self._part)

    def end_requests(self) -> None:
        self._rounds.end_requests(self._part)

    @property
    def paused_s(self) -> float:
        return self._rounds.paused_s


def _untimed(phase: str) -> contextlib.AbstractContextManager[None]:
    """Time nothing: phases of several threads overlap."""
    return contextlib.nullcontext()
