"""Run episodes: the policy and an environment take turns, in rounds of all episodes of a step."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np

from trainer.config import Config
from trainer.data.chats import check_generation_prompt
from trainer.data.datasets import Prompt, name_in_mix
from trainer.data.limits import TextTooLong, max_characters
from trainer.data.replies import reply_texts
from trainer.environments.base import Message
from trainer.environments.conversation import Conversation
from trainer.environments.sessions import EnvironmentPool, Session
from trainer.environments.template_tools import find_reader
from trainer.episodes import Episode, Sample
from trainer.errors import UserError
from trainer.generation.engine import Completion, Request, Sampling
from trainer.generation.request_stream import RequestStream
from trainer.rewards.scores import Failures
from trainer.seeding import environment_seed, request_seed

LOG = logging.getLogger(__name__)

PhaseTimer = Callable[[str], AbstractContextManager[None]]
"""Times a block as a phase of the step."""


class Generation(Protocol):
    """How the episodes of a call get their completions."""

    def __call__(self, requests: Sequence[Request]) -> Iterator[dict[int, Completion]]:
        """Yield all completions, by the indices of their requests, as they are complete."""
        ...

    def open_stream(self) -> RequestStream:
        """Return a stream that takes requests at any time."""
        ...

    def end_requests(self) -> None:
        """Note that no more completions will be asked for. A runner that cannot tell this early need not call it."""
        ...

    @property
    def paused_s(self) -> float:
        """Seconds for which no engine could generate, since the job has begun."""
        ...


class Clock:
    """Returns the seconds since it was made, without those in which no engine could generate."""

    def __init__(self, generate: Generation):
        self._generate = generate
        self._began_at = self._now()

    def __call__(self) -> float:
        return self._now() - self._began_at

    def _now(self) -> float:
        return time.monotonic() - self._generate.paused_s


@dataclass(frozen=True)
class RolloutRequest:
    """One episode to run."""

    prompt: Prompt
    """With an environment, its row: the environment writes the messages."""
    group: str
    """Names the prompt in this epoch. With the next two, it keys every random draw."""
    step: int
    number: int
    """Of the episode, among those of the group."""
    sampling: Sampling
    purpose: str = ""
    """What the episode is for, in messages; empty: the step."""

    @property
    def uid(self) -> str:
        return f"{self.group}:{self.number}"


class EpisodeRunner(contextlib.AbstractContextManager["EpisodeRunner"]):
    """Runs episodes, for several threads at the same time. A base class."""

    def run(
        self,
        requests: Sequence[RolloutRequest],
        generate: Generation,
        timer: PhaseTimer,
        known: int | None = 0,
        check: Callable[[], None] = lambda: None,
    ) -> Iterator[dict[int, Episode]]:
        """Yield the episodes of all requests, by the indices of these, as they end. Their rewards may be missing.

        Where reward functions give the rewards, an empty chunk follows from time to time while none ends, so that
        rewards that have become known meanwhile are recorded.

        Args:
            known: further episodes of the step that count as not failed: those that are there already, and those of
                other runners. None: the caller alone judges whether too many have failed.
            check: called while this waits for environments, in a stream whenever something happens. It raises to end
                that.
        """
        raise NotImplementedError

    def __exit__(self, *exception: object) -> None:
        """End what runs episodes."""


class SingleTurnRunner(EpisodeRunner):
    """An episode is one prompt and one completion. Its reward is None: reward functions compute it."""

    def __init__(self, cfg: Config, tokenizer: Any):
        self._seed = cfg.trainer.seed
        self._tokenizer = tokenizer
        self._lock = threading.Lock()  # one thread at a time may use the tokenizer

    def run(
        self,
        requests: Sequence[RolloutRequest],
        generate: Generation,
        timer: PhaseTimer,
        known: int | None = 0,
        check: Callable[[], None] = lambda: None,
    ) -> Iterator[dict[int, Episode]]:
        # One array for all requests of a prompt: it is pickled once.
        prompts = {request.group: np.asarray(request.prompt.token_ids, np.int32) for request in requests}
        to_generate = [_request(request, prompts[request.group], self._seed) for request in requests]
        for chunk in generate(to_generate):
            if not chunk:
                yield {}
                continue
            replies = [(completion.token_ids, completion.finish_reason == "stop") for completion in chunk.values()]
            with self._lock:
                texts = reply_texts(self._tokenizer, replies)
            yield {
                index: _single_turn(requests[index], prompts[requests[index].group], completion, text)
                for (index, completion), text in zip(chunk.items(), texts, strict=True)
            }


class RunningEpisode(Session):
    """An episode with an environment, while it runs."""

    def __init__(self, index: int, request: RolloutRequest, run_seed: int):
        super().__init__(request.prompt.row, environment_seed(run_seed, request.group))
        self.index = index
        """Of its request in the call."""
        self.request = request
        self.conversation: Conversation | None = None
        self.was_cut = False
        """The last reply has reached its limit."""
        self.is_answered = False
        """What the environment has answered last is part of the conversation. Only a stream notes it."""
        self.is_yielded = False

    def needs_reply(self, max_turns: int) -> bool:
        """Whether the policy may be asked once more, whatever the environment answers."""
        return not (self.ended or self.was_cut or len(self.replies) == max_turns)

    def take_reply(self, completion: Completion) -> None:
        assert self.conversation is not None
        self.was_cut = completion.finish_reason == "length"
        self.replies.append(self.conversation.add_reply(completion))

    def end(self, status: str) -> None:
        self.status, self.ended = status, True


class EnvironmentRunner(EpisodeRunner):
    """Runs episodes in which the policy and an environment take turns. The environment gives the reward.

    All episodes get their next reply together, as one batch for the engines. Then all environments step; finished
    episodes drop out.
    """

    def __init__(self, cfg: Config, tokenizer: Any):
        self._config = e = cfg.environment
        self._answer_key = cfg.data.answer_key
        self._seed = cfg.trainer.seed
        self._first_limit = ("rollout.max_prompt_tokens", cfg.rollout.max_prompt_tokens)
        self._longest = cfg.longest_prompt
        self._most_tokens = e.most_tokens
        self._tokenizer = tokenizer
        self._lock = threading.Lock()  # one thread at a time may use the tokenizer
        check_generation_prompt(tokenizer)
        self._limit = max_characters(tokenizer, self._longest)
        self._reader = find_reader(cfg.model, tokenizer)
        self._pool = EnvironmentPool(cfg.environment, self._limit)
        self._begun: tuple[str, Conversation] | None = None
        """The first messages that were written last, as JSON, and their tokens."""

    def __enter__(self) -> Self:
        self._pool.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._pool.__exit__(*exception)

    def run(
        self,
        requests: Sequence[RolloutRequest],
        generate: Generation,
        timer: PhaseTimer,
        known: int | None = 0,
        check: Callable[[], None] = lambda: None,
    ) -> Iterator[dict[int, Episode]]:
        """Yield episodes as they end. If that fails, or nobody reads on, the environments are closed.

        Raises:
            UserError: more than `environment.max_error_rate` of the episodes have failed.
        """
        episodes = [RunningEpisode(index, request, self._seed) for index, request in enumerate(requests)]
        clock = Clock(generate)
        try:
            yield from self._run(episodes, generate, clock, timer, known, check)
        except BaseException:
            for episode in episodes:
                episode.fail("failed", "was stopped")
            with contextlib.suppress(Exception):  # the first error counts
                self._pool.step_all(episodes)
            raise

    def _run(
        self,
        episodes: Sequence[RunningEpisode],
        generate: Generation,
        clock: Clock,
        timer: PhaseTimer,
        known: int | None,
        check: Callable[[], None],
    ) -> Iterator[dict[int, Episode]]:
        with timer("environment"):
            self._pool.step_all(episodes, check)
            with self._lock:
                for episode in episodes:
                    self._continue(episode, clock)
        for _ in range(self._config.max_turns):
            self._check_failures(episodes, known)
            active = [episode for episode in episodes if not episode.ended]
            if not active:
                break
            prompts = [self._next_request(episode) for episode in active]
            replies = {index: reply for chunk in generate(prompts) for index, reply in chunk.items()}
            with timer("environment"):
                with self._lock:
                    for index, episode in enumerate(active):
                        episode.take_reply(replies[index])
                if not any(episode.needs_reply(self._config.max_turns) for episode in active):
                    generate.end_requests()
                self._pool.step_all(episodes, check)
                with self._lock:
                    for episode in active:
                        self._continue(episode, clock)
            yield from self._newly_ended(episodes)
        with timer("environment"):
            self._pool.step_all(episodes, check)  # closes what is left
        self._check_failures(episodes, known)
        yield from self._newly_ended(episodes)

    def _newly_ended(self, episodes: Sequence[RunningEpisode]) -> Iterator[dict[int, Episode]]:
        ended = [episode for episode in episodes if episode.ended and not episode.is_yielded]
        for episode in ended:
            episode.is_yielded = True
        if ended:
            yield {episode.index: self._ended(episode) for episode in ended}

    def _next_request(self, episode: RunningEpisode) -> Request:
        assert episode.conversation is not None
        prompt = episode.conversation.token_ids
        sampling = episode.request.sampling.within(self._most_tokens, len(prompt))
        request = dataclasses.replace(episode.request, sampling=sampling)
        return _request(request, prompt, self._seed, len(episode.replies))

    def _continue(self, episode: RunningEpisode, clock: Clock) -> None:
        """Add what the environment has answered, and end the episode if it is over."""
        if episode.ended:
            return
        try:
            if episode.conversation is None:
                self._begin(episode)
            else:
                self._add_answer(episode, episode.conversation)
        except UserError as error:  # the chat template refuses the messages
            episode.fail("failed", f"gave messages that have no tokens: {error}")
        seconds = self._config.max_seconds
        if not episode.ended and seconds and clock() > seconds:
            episode.fail("timeout", f"was not done after environment.max_seconds={seconds:g}")

    def _begin(self, episode: RunningEpisode) -> None:
        key, most = self._first_limit
        try:
            episode.conversation = self._conversation(episode.steps[0].messages)
            length = len(episode.conversation.token_ids)
            size = f"{length} tokens" if length > most else ""
        except TextTooLong as error:
            size = str(error)
        if size:
            episode.fail("failed", f"has first messages of {size}; {key} is {most}")

    def _conversation(self, messages: Sequence[Message]) -> Conversation:
        """Return a new conversation. Episodes of one prompt mostly begin with the same messages, written once."""
        text = json.dumps(messages)  # what is rendered differs for 1 and True, and with the order of keys
        if self._begun is None or self._begun[0] != text:
            self._begun = text, Conversation(self._tokenizer, messages, self._limit, self._reader)
        return self._begun[1].fork()

    def _add_answer(self, episode: RunningEpisode, conversation: Conversation) -> None:
        step = episode.steps[-1]
        if step.done or episode.was_cut or len(episode.replies) == self._config.max_turns:
            conversation.messages += step.messages
            episode.end("stop" if step.done else "length" if episode.was_cut else "turns")
        elif not conversation.add_messages(step.messages, self._longest):
            episode.end("length")

    def _check_failures(self, episodes: Sequence[RunningEpisode], known: int | None) -> None:
        failures = [(episode.request, episode.failure) for episode in episodes]
        check_failures(failures, known, self._config.max_error_rate)

    def _ended(self, episode: RunningEpisode) -> Episode:
        request, conversation = episode.request, episode.conversation
        answer = request.prompt.row.get(self._answer_key)
        fields: dict[str, Any] = {
            "status": episode.status,
            "answer": "" if answer is None else str(answer),
            "failure": episode.failure,
            "reward": None if episode.is_spared else 0.0,
        }
        if not episode.failure:
            fields["reward"] = episode.reward
            fields |= {"rewards": episode.total("rewards"), "metrics": episode.total("metrics")}
        if conversation is None:
            return Episode(request.uid, request.group, [empty_sample(self._tokenizer)], turns=0, **fields)
        fields |= {"turns": len(episode.replies), "messages": conversation.messages}
        return Episode(request.uid, request.group, conversation.samples(), **fields)


def check_failures(episodes: Sequence[tuple[RolloutRequest, str]], known: int | None, max_error_rate: float) -> None:
    """Refuse to go on if too many of the episodes of a call have failed.

    Args:
        episodes: what was asked for, and why its environment or agent has failed; empty if it has not.
        known: see `EpisodeRunner.run`.

    Raises:
        UserError: more than `max_error_rate` have.
    """
    if known is None:
        return
    reasons: dict[str, list[str]] = {}
    for request, failure in episodes:
        reasons.setdefault(name_in_mix(request.prompt.source), []).append(failure)
    by_name = [Failures.among(some, "environment") for some in reasons.values()]
    failures = Failures.together(list(reasons), by_name)
    first, _ = episodes[0]
    problem = failures.problem(len(episodes) + known, max_error_rate, first.purpose or f"step {first.step}")
    if problem is not None:
        raise UserError(problem)


def empty_sample(tokenizer: Any) -> Sample:
    """Return the sample of an episode without a token, because a sample must have one."""
    empty = np.zeros(1, np.float32)
    return Sample(np.full(1, tokenizer.eos_token_id, np.int32), empty, empty, (0, 0))


def _request(request: RolloutRequest, token_ids: Sequence[int] | np.ndarray, run_seed: int, turn: int = 0) -> Request:
    seed = request_seed(run_seed, request.step, request.group, request.number, turn)
    return Request(token_ids, seed, request.sampling)


def _single_turn(request: RolloutRequest, prompt: np.ndarray, completion: Completion, text: str) -> Episode:
    messages = [*request.prompt.messages, {"role": "assistant", "content": text}]
    return Episode(
        request.uid,
        request.group,
        [_sample(prompt, completion)],
        reward=None,
        status=completion.finish_reason,
        messages=messages,
        answer=request.prompt.answer,
    )


def _sample(prompt: np.ndarray, completion: Completion) -> Sample:
    start, length = len(prompt), len(prompt) + len(completion.token_ids)
    mask, logprobs = np.zeros(length, np.float32), np.zeros(length, np.float32)
    mask[start:] = 1.0
    logprobs[start:] = completion.logprobs
    tokens = np.concatenate([prompt, completion.token_ids])
    return Sample(tokens, mask, logprobs, completion.weight_versions, completion.version_spans)
