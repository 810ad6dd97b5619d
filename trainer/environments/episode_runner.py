"""Play episodes: the policy and an environment take turns, all episodes of a step at the same time."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import numpy as np

from trainer.config import Config
from trainer.data.limits import TextTooLong, most_characters
from trainer.environments.base import Message
from trainer.environments.conversation import Conversation
from trainer.environments.sessions import EnvironmentPool, Session
from trainer.episodes import Sample
from trainer.errors import UserError
from trainer.generation.engine import Completion, Request
from trainer.rewards.scores import OUTCOMES
from trainer.seeding import environment_seed, request_seed

LOG = logging.getLogger(__name__)

Generate = Callable[[Sequence[Request]], Iterator[dict[int, Completion]]]
"""Yields all completions, by the places of their requests, as they are complete."""
Clock = Callable[[str], AbstractContextManager[None]]
"""Times a block as a phase of the step."""


@dataclass(frozen=True)
class Attempt:
    """One episode to play."""

    row: Mapping[str, Any]
    prompt_token_ids: Sequence[int]
    """The prompt. An environment makes its own."""
    uid: str
    """Of the prompt. With the next two, it names every random draw."""
    step: int
    number: int


@dataclass(frozen=True)
class Played:
    """What has become of an attempt."""

    samples: list[Sample]
    status: str
    """See `trainer.episodes.Episode.status`."""
    text: str
    """The last reply."""
    turns: int = 1
    reward: float | None = None
    """None: reward functions judge it."""
    messages: Sequence[Message] = ()
    """The whole conversation. Empty: a prompt and a completion."""
    failure: str = ""
    """Why its environment has failed."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """The named terms of `reward`."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What its environment, or its tools, have counted."""

    @property
    def length(self) -> int:
        """Tokens that the policy has sampled."""
        return int(sum((sample.mask > 0).sum() for sample in self.samples))


class Player(Protocol):
    """Plays episodes. A context manager."""

    def play(self, attempts: Sequence[Attempt], generate: Generate, clock: Clock) -> Iterator[dict[int, Played]]:
        """Yield what has become of all attempts, by their places, as they end."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: Any) -> None: ...


class SingleTurn(contextlib.AbstractContextManager["SingleTurn"]):
    """An episode is one prompt and one completion."""

    def __init__(self, cfg: Config, tokenizer: Any):
        self._seed = cfg.trainer.seed
        self._tokenizer = tokenizer

    def play(self, attempts: Sequence[Attempt], generate: Generate, clock: Clock) -> Iterator[dict[int, Played]]:
        # One array for all attempts at a prompt: it is pickled once.
        prompts = {attempt.uid: np.asarray(attempt.prompt_token_ids, np.int32) for attempt in attempts}
        requests = [_request(attempt, prompts[attempt.uid], self._seed) for attempt in attempts]
        for part in generate(requests):
            tokens = [completion.token_ids.tolist() for completion in part.values()]
            texts = self._tokenizer.batch_decode(tokens, skip_special_tokens=True)
            yield {
                place: Played([_sample(requests[place].prompt_token_ids, completion)], completion.finish_reason, text)
                for (place, completion), text in zip(part.items(), texts, strict=True)
            }

    def __exit__(self, *exception: Any) -> None:
        pass


class _Playing:
    """An episode with an environment, while it is played."""

    def __init__(self, attempt: Attempt, session: Session):
        self.attempt = attempt
        self.session = session
        self.conversation: Conversation | None = None
        self.status = ""
        self.text = ""

    def take_reply(self, completion: Completion) -> None:
        assert self.conversation is not None
        reply = self.conversation.add_reply(completion)
        self.text = reply["content"]
        self.session.replies.append(reply)

    def end(self, status: str) -> None:
        self.status, self.session.ended = status, True


class EnvironmentPlayer:
    """The policy and an environment take turns.

    All episodes get their next reply together, then all environments answer; who is done leaves. So a round is one
    batch for the engines.
    """

    def __init__(self, cfg: Config, tokenizer: Any):
        self._config = cfg.environment
        self._seed = cfg.trainer.seed
        self._longest = cfg.rollout.max_prompt_tokens
        self._tokenizer = tokenizer
        self._limit = most_characters(tokenizer, self._longest)
        self._pool = EnvironmentPool(cfg.environment, self._limit)

    def __enter__(self) -> Self:
        self._pool.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._pool.__exit__(*exception)

    def play(self, attempts: Sequence[Attempt], generate: Generate, clock: Clock) -> Iterator[dict[int, Played]]:
        """Yield what has become of all attempts, by their places, when all have ended.

        Raises:
            UserError: more than `environment.max_error_rate` of the episodes have failed.
        """
        sessions = [Session(attempt.row, environment_seed(self._seed, attempt.uid)) for attempt in attempts]
        episodes = [_Playing(attempt, session) for attempt, session in zip(attempts, sessions, strict=True)]
        step = attempts[0].step
        with clock("environment"):
            self._pool.advance(sessions)
            for episode in episodes:
                self._begin(episode)
        for turn in range(self._config.max_turns):
            self._check_failures(sessions, step)
            active = [episode for episode in episodes if not episode.status]
            if not active:
                break
            requests = [
                _request(e.attempt, e.conversation.token_ids, self._seed, turn) for e in active if e.conversation
            ]
            replies = {place: reply for part in generate(requests) for place, reply in part.items()}
            completions = [replies[place] for place in range(len(requests))]
            with clock("environment"):
                for episode, completion in zip(active, completions, strict=True):
                    episode.take_reply(completion)
                self._pool.advance(sessions)
                for episode, completion in zip(active, completions, strict=True):
                    self._continue(episode, completion, last=turn + 1 == self._config.max_turns)
        with clock("environment"):
            self._pool.advance(sessions)  # closes what is left
        self._check_failures(sessions, step)
        yield dict(enumerate(map(self._played, episodes)))

    def _begin(self, episode: _Playing) -> None:
        session = episode.session
        if not session.failure:
            try:
                episode.conversation = Conversation(self._tokenizer, session.steps[0].messages, self._limit)
                length = len(episode.conversation.token_ids)
                size = f"{length} tokens" if length > self._longest else ""
            except TextTooLong as error:
                size = str(error)
            if size:
                session.fail("failed", f"has first messages of {size}; rollout.max_prompt_tokens is {self._longest}")
        if session.failure:
            episode.end(session.status)

    def _continue(self, episode: _Playing, completion: Completion, last: bool) -> None:
        """Add what the environment has answered, and end the episode if it is over."""
        session, conversation = episode.session, episode.conversation
        assert conversation is not None
        if session.failure:
            episode.end(session.status)
            return
        step = session.steps[-1]
        if step.done or completion.finish_reason == "length" or last:
            conversation.messages += step.messages
            episode.end("stop" if step.done else "length" if completion.finish_reason == "length" else "turns")
        elif not conversation.add_messages(step.messages, self._longest):
            episode.end("length")

    def _check_failures(self, sessions: Sequence[Session], step: int) -> None:
        failures = [session.failure for session in sessions if session.failure]
        if len(failures) > self._config.max_error_rate * len(sessions):
            raise UserError(
                f"environment.name={self._config.name}: {len(failures)} of {len(sessions)} episodes of step {step} "
                f"({len(failures) / len(sessions):.1%}) have failed, more than environment.max_error_rate="
                f"{self._config.max_error_rate:g} allows; the first: {failures[0]}"
            )

    def _played(self, episode: _Playing) -> Played:
        session, conversation = episode.session, episode.conversation
        given: dict[str, Any] = {"reward": 0.0, "failure": session.failure}
        if not session.failure:
            given = {"reward": session.reward, "rewards": session.total("rewards"), "metrics": session.total("metrics")}
        if conversation is None:  # it has no token, and a sample must have one
            empty = np.zeros(1, np.float32)
            samples = [Sample(np.full(1, self._tokenizer.eos_token_id, np.int32), empty, empty, (0, 0))]
            return Played(samples, episode.status, "", 0, **given)
        given |= {"turns": len(session.replies), "messages": conversation.messages}
        return Played(conversation.samples(), episode.status, episode.text, **given)


def report_failures(played: Sequence[Played], on_failure: str, purpose: str) -> int:
    """Return the number of episodes whose environment has failed; log it with the first reason.

    Args:
        on_failure: `environment.on_failure`.
        purpose: names what the episodes are for.
    """
    failures = [episode.failure for episode in played if episode.failure]
    if failures:
        share, outcome = len(failures) / len(played), OUTCOMES[on_failure]
        LOG.warning(
            f"{len(failures)} of {len(played)} environments of {purpose} ({share:.1%}) failed and their episodes "
            f"{outcome}; the first: {failures[0]}"
        )
    return len(failures)


def _request(attempt: Attempt, token_ids: Sequence[int] | np.ndarray, run_seed: int, turn: int = 0) -> Request:
    return Request(token_ids, request_seed(run_seed, attempt.step, attempt.uid, attempt.number, turn))


def _sample(prompt: np.ndarray, completion: Completion) -> Sample:
    start, length = len(prompt), len(prompt) + len(completion.token_ids)
    mask, logprobs = np.zeros(length, np.float32), np.zeros(length, np.float32)
    mask[start:] = 1.0
    logprobs[start:] = completion.logprobs
    version = completion.weight_version
    return Sample(np.concatenate([prompt, completion.token_ids]), mask, logprobs, (version, version))
