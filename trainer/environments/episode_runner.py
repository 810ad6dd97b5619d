"""Run episodes: the policy and an environment take turns."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np

from trainer.config import Config
from trainer.data.chats import check_generation_prompt
from trainer.data.datasets import Prompt
from trainer.data.tokens import TextTooLong, max_characters, reply_text
from trainer.environments.base import Message, StepResult
from trainer.environments.conversation import Conversation, sample_of
from trainer.environments.sessions import EnvironmentPool, Session
from trainer.environments.template_tools import find_reader
from trainer.episodes import Episode, Sample
from trainer.errors import UserError
from trainer.generation.engine import Completion, Request, Sampling
from trainer.seeding import environment_seed, request_seed


class Turns(Protocol):
    """The turns of one episode, as the journal has them (see `trainer.sources.turns.EpisodeTurns`)."""

    key: str
    """Names the episode, also after a kill."""

    def recorded_answer(self, number: int) -> tuple[StepResult, str | None] | None: ...

    def add_answer(self, number: int, answer: StepResult, state: str | None) -> None: ...


class Asks(Protocol):
    """How one episode asks for completions."""

    turns: Turns

    async def __call__(self, request: Request, turn: str) -> Completion:
        """Return a completion, or the one that was recorded.

        Args:
            turn: names the request within the episode; the same in another attempt.
        """
        ...

    def finish(self) -> None:
        """Note that the episode will ask for no more. A runner that cannot tell this early need not call it."""
        ...


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

    @property
    def uid(self) -> str:
        return f"{self.group}:{self.number}"


class EpisodeRunner(contextlib.AbstractContextManager["EpisodeRunner"]):
    """Runs episodes on the event loop, each in a coroutine. A context manager, on the main thread."""

    @contextlib.asynccontextmanager
    async def together(self) -> AsyncIterator[Any]:
        """Run episodes that begin together in the block. `run` gets what this yields."""
        yield None

    async def run(self, request: RolloutRequest, asks: Asks, together: Any) -> Episode:
        """Run one episode. Its reward may be missing."""
        raise NotImplementedError

    def __exit__(self, *exception: object) -> None:
        """End what runs episodes."""


class SingleTurnRunner(EpisodeRunner):
    """An episode is one prompt and one completion. Its reward is None: reward functions compute it."""

    def __init__(self, cfg: Config, tokenizer: Any):
        self._seed = cfg.trainer.seed
        self._tokenizer = tokenizer
        self._last: tuple[Prompt | None, np.ndarray] = None, np.zeros(0, np.int32)

    async def run(self, request: RolloutRequest, asks: Asks, together: Any) -> Episode:
        prompt = request.prompt
        if self._last[0] is not prompt:  # one array for all requests of a prompt: it is pickled once
            self._last = prompt, np.asarray(prompt.token_ids, np.int32)
        ids = self._last[1]
        completion = await asks(_request(request, ids, self._seed), "0")
        asks.finish()
        text = reply_text(self._tokenizer, completion.token_ids.tolist(), completion.finish_reason == "stop")
        return Episode(
            request.uid,
            request.group,
            [sample_of(np.concatenate([ids, completion.token_ids]), [(len(ids), completion)])],
            reward=None,
            status=completion.finish_reason,
            messages=[*prompt.messages, {"role": "assistant", "content": text}],
            answer=prompt.answer,
        )


class RunningEpisode(Session):
    """An episode with an environment, while it runs."""

    def __init__(self, request: RolloutRequest, run_seed: int, turns: Turns):
        super().__init__(
            request.prompt.row, environment_seed(run_seed, request.group), turns.key, turns.recorded_answer
        )
        self.request = request
        self.conversations: dict[str, Conversation] = {}
        """Of each player that has been asked."""
        self.was_cut = False
        """The last reply has reached its limit."""

    @property
    def conversation(self) -> Conversation:
        """Of the player whose turn it is."""
        return self.conversations[self.steps[-1].player]

    def take_reply(self, completion: Completion) -> None:
        self.was_cut = completion.finish_reason == "length"
        self.replies.append(self.conversation.add_reply(completion))

    def samples(self) -> list[Sample]:
        """Return the samples of all players, with the rewards of those that have names."""
        found = []
        for player, conversation in self.conversations.items():
            reward = self.reward_of(player) if player and not self.failure else None
            found += [dataclasses.replace(one, reward=reward, player=player) for one in conversation.samples()]
        return [sample for sample in found if not sample.player or sample.mask.any()] or found

    def end(self, status: str) -> None:
        self.status, self.ended = status, True


class EnvironmentRunner(EpisodeRunner):
    """Runs episodes in which the policy and an environment take turns. The environment gives the reward."""

    def __init__(self, cfg: Config, tokenizer: Any):
        self._config = e = cfg.environment
        self._answer_key = cfg.data.answer_key
        self._seed = cfg.trainer.seed
        self._first_limit = ("rollout.max_prompt_tokens", cfg.rollout.max_prompt_tokens)
        self._longest = e.max_tokens - 1 if e.max_tokens > 0 else cfg.rollout.max_prompt_tokens  # before a reply
        self._most_tokens = e.most_tokens
        self._tokenizer = tokenizer
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

    @contextlib.asynccontextmanager
    async def together(self) -> AsyncIterator[Any]:
        async with self._pool.calls() as calls:
            yield calls

    async def run(self, request: RolloutRequest, asks: Asks, together: Any) -> Episode:
        episode = RunningEpisode(request, self._seed, asks.turns)
        try:
            await self._next_answer(episode, asks, together)
            while not episode.ended:
                turn = str(len(episode.replies))
                episode.take_reply(await asks(self._next_request(episode), turn))
                if episode.was_cut or len(episode.replies) == self._config.max_turns:
                    asks.finish()  # whatever the environment answers
                await self._next_answer(episode, asks, together)
        finally:
            episode.fail("failed", "was stopped")  # if it has not ended
            together.begin(episode.close(together))
        return self._ended(episode)

    async def _next_answer(self, episode: RunningEpisode, asks: Asks, together: Any) -> None:
        """Let the environment answer, record that, and add it to the conversation."""
        await episode.answer(together)
        if len(episode.steps) > len(episode.replies):
            asks.turns.add_answer(len(episode.replies), episode.steps[-1], episode.state)
        self._continue(episode)

    def _next_request(self, episode: RunningEpisode) -> Request:
        prompt = episode.conversation.token_ids
        sampling = episode.request.sampling.within(self._most_tokens, len(prompt))
        request = dataclasses.replace(episode.request, sampling=sampling)
        return _request(request, prompt, self._seed, len(episode.replies))

    def _continue(self, episode: RunningEpisode) -> None:
        """Add what the environment has answered, and end the episode if it is over."""
        if episode.ended:
            return
        try:
            self._add_answer(episode)
        except UserError as error:  # the chat template refuses the messages
            episode.fail("failed", f"gave messages that have no tokens: {error}")

    def _begin(self, episode: RunningEpisode) -> None:
        key, most = self._first_limit
        try:
            step = episode.steps[-1]
            episode.conversations[step.player] = self._conversation(step.messages)
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

    def _add_answer(self, episode: RunningEpisode) -> None:
        step = episode.steps[-1]
        conversation = episode.conversations.get(step.player)
        if step.done or episode.was_cut or len(episode.replies) == self._config.max_turns:
            if conversation is not None:
                conversation.messages += step.messages
            episode.end("stop" if step.done else "length" if episode.was_cut else "turns")
        elif conversation is None:
            self._begin(episode)
        elif not conversation.add_messages(step.messages, self._longest):
            episode.end("length")

    def _ended(self, episode: RunningEpisode) -> Episode:
        request, samples = episode.request, episode.samples()
        fields: dict[str, Any] = {
            "status": episode.status,
            "answer": self._answer(request),
            "failure": episode.failure,
            "reward": None if episode.is_spared else 0.0,
        }
        if not episode.failure:
            rewards = [episode.reward_of(player) for player in episode.conversations]
            fields["reward"] = sum(rewards) / len(rewards)
            fields |= {"rewards": episode.total("rewards"), "metrics": episode.total("metrics")}
        if not samples:
            return Episode(request.uid, request.group, [empty_sample(self._tokenizer)], turns=0, **fields)
        messages = [message for chat in episode.conversations.values() for message in chat.messages]
        return Episode(request.uid, request.group, samples, turns=len(episode.replies), messages=messages, **fields)

    def _answer(self, request: RolloutRequest) -> str:
        """Return the answer in the row of an episode, as text."""
        answer = request.prompt.row.get(self._answer_key)
        return "" if answer is None else str(answer)


def empty_sample(tokenizer: Any) -> Sample:
    """Return the sample of an episode without a token, because a sample must have one."""
    empty = np.zeros(1, np.float32)
    return Sample(np.full(1, tokenizer.eos_token_id, np.int32), empty, empty, (0, 0))


def _request(request: RolloutRequest, token_ids: Sequence[int] | np.ndarray, run_seed: int, turn: int = 0) -> Request:
    seed = request_seed(run_seed, request.step, request.group, request.number, turn)
    return Request(token_ids, seed, request.sampling)
