"""Run episodes: the policy and an environment take turns.

Environments have their own processes: one that hangs, raises or crashes costs at most its episode. A lost environment
is made again in another process, and gets the same replies. If it fails in the same call again, its episode has failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, Protocol, Self

import numpy as np
import xxhash

from trainer.config import Config, EnvironmentConfig
from trainer.data.chats import check_generation_prompt
from trainer.data.datasets import Prompt
from trainer.data.tokens import TextTooLong, max_characters, reply_text
from trainer.environments.base import Message, StepResult
from trainer.environments.conversation import Conversation, sample_of
from trainer.environments.template_tools import find_reader
from trainer.environments.turns import EpisodeTurns
from trainer.environments.worker import largest_message
from trainer.episodes import Episode, Sample
from trainer.errors import UserError
from trainer.files.documents import mismatch
from trainer.generation.engine import Completion, Request, Sampling
from trainer.sandbox.limits import LARGEST_REWARD, MAX_ASYNC_SESSIONS, MAX_ATTEMPTS
from trainer.sandbox.pool import Call, CallFailed, CallLost, Calls, WorkerPool
from trainer.seeding import environment_seed, request_seed

LOG = logging.getLogger(__name__)

_NUMBERS = itertools.count()
RESULT: dict[Any, Any] = {"reward": float, "rewards": dict, "metrics": dict, "player_rewards": dict}
"""The fields of what an agent returns, as its process sends them."""
_STEP = {**RESULT, "messages": list, "done": bool, "player": str}


class Asks(Protocol):
    """How one episode asks for completions."""

    turns: EpisodeTurns

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

    prompt: Prompt  # with an environment, its row: the environment writes the messages
    group: str
    """Names the prompt in this epoch. With the next two, it keys every random draw."""
    step: int
    number: int  # of the episode, among those of the group
    sampling: Sampling

    @property
    def uid(self) -> str:
        return f"{self.group}:{self.number}"

    def of_turn(self, turn: int, token_ids: Sequence[int] | np.ndarray, run_seed: int, most: int | None) -> Request:
        """Return the request to the engines for the reply of a turn. At most `most` tokens are prompt and reply."""
        seed = request_seed(run_seed, self.step, self.group, self.number, turn)
        return Request(token_ids, seed, self.sampling.within(most, len(token_ids)))


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
        completion = await asks(request.of_turn(0, ids, self._seed, None), "0")
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


class Session:
    """An episode with an environment on the driver: the calls and the answers so far, and the conversations.

    Args:
        key: names the episode, also after a kill: the ids of its steps are digests of it and of the replies.
        recorded: returns what the journal has as the answer to a call, by its number, and as the state of the
            environment after it; None: no answer.
    """

    most_attempts = MAX_ATTEMPTS

    def __init__(
        self,
        row: Mapping[str, Any],
        seed: int,
        key: str = "",
        recorded: Callable[[int], tuple[StepResult, str | None] | None] = lambda number: None,
    ):
        self.row = row
        self.seed = seed
        self.state: str | None = None
        """What the environment has saved after the last step, if it can save itself."""
        self._key = key
        self._step_ids: list[str] = []
        self._recorded = recorded
        self.replies: list[Message] = []  # the replies of the policy
        self.steps: list[StepResult] = []
        """The answers of the environment: the first messages, then a step for each reply."""
        self.ended = False  # the episode needs no more steps
        self.status = ""
        """Why the episode has ended: `timeout` or `failed` if the environment has failed."""
        self.failure = ""  # why the environment has failed
        self.is_spared = False  # the policy cannot have caused the failure
        self.conversations: dict[str, Conversation] = {}  # of each player that has been asked
        self.was_cut = False  # the last reply has reached its limit
        self.failures = 0  # calls that have failed
        self.worker: Any = None  # the process that has the environment
        self._answered = 0  # calls that the present environment has answered, or the one whose state is loaded
        self._is_stored = True  # it is not made: its recorded answers are enough so far, and its state
        self._number = next(_NUMBERS)  # its name in messages to the process

    async def answer(self, calls: Calls) -> None:
        """Let the environment answer all replies: it has done so then, or has failed.

        Raises:
            WorkerError: the processes cannot start.
        """
        is_alone = False
        while not self.ended and self._answered <= len(self.replies):
            answer, state = self._recorded(self._answered) or (None, None)
            if answer is not None and (answer.done or self._is_stored and state is not None):
                self._accept(answer, state)  # after the last answer, the environment is not needed
                self._answered += 1
                continue
            method, given = self._next_call(answer)
            call = self._call(method, given, is_alone)
            try:
                value = await calls.ask(call)
            except asyncio.CancelledError:
                self.worker = call.worker  # it may have the environment, which `close` ends there
                raise
            except CallLost as lost:
                is_alone, self.worker = is_alone or lost.is_suspect, None
                self._lose()
            except CallFailed as failed:
                self.worker = None if failed.status == "died" else call.worker
                self._lose()
                self.failures += 1
                if self.failures >= self.most_attempts:
                    self.fail(failed.status, f"{method} {failed.reason}")
            else:
                self.worker, self._is_stored = call.worker, False
                if method != "load":
                    self._take(value)

    def _next_call(self, recorded: StepResult | None) -> tuple[str, list[Any]]:
        """Return the next call of the present environment. A new one loads what the one before has saved."""
        if self._is_stored and self.state is not None:
            return "load", [self.state]
        if not self._answered:
            return "reset", [self.row, self.seed, self._step_id(0)]
        known = self.steps[self._answered] if self._answered < len(self.steps) else recorded
        given = None if known is None else vars(known)
        return "step", [self.replies[self._answered - 1], self._step_id(self._answered), given]

    def _lose(self) -> None:
        """A new environment must take the place of the present one."""
        self._is_stored = self.state is not None
        self._answered = len(self.steps) if self._is_stored else 0

    def _step_id(self, number: int) -> str:
        """Return the id of a call: the same for the same episode and replies, in any process."""
        while len(self._step_ids) <= number:
            before = [self._step_ids[-1], self.replies[len(self._step_ids) - 1]] if self._step_ids else [self._key]
            self._step_ids.append(xxhash.xxh3_128_hexdigest(json.dumps(before).encode()))
        return self._step_ids[number]

    async def close(self, calls: Calls) -> None:
        """Close the environment."""
        if self.worker is None:
            return
        call = self._call("close", [])
        self.worker = None
        try:
            await calls.ask(call)
        except CallLost:
            pass
        except CallFailed as failed:
            LOG.info("an environment was not closed: close %s", failed.reason)

    def _call(self, method: str, given: list[Any], is_alone: bool = False) -> Call:
        ends = method == "close"
        message = [self._number, method, *given]
        return Call(message, method, is_alone=is_alone, is_session=True, ends_session=ends, worker=self.worker)

    def _take(self, value: Any) -> None:
        """Take an answer. One that was given before must be the same."""
        if mismatch(value, {**_STEP, "state": (str, NoneType)}):
            self.fail("failed", "has written into the pipe of its process")
            return
        step, state = StepResult(**{name: value[name] for name in _STEP}), value["state"]
        if self._answered == len(self.steps):
            self._accept(step, state)
        elif step != self.steps[self._answered]:
            self.fail(
                "failed",
                "answered the same replies in another way when they were repeated; an environment must be a function "
                "of row, seed and replies",
                by_policy=False,
            )
        self._answered += 1

    def _accept(self, step: StepResult, state: str | None) -> None:
        """Add an answer that was not given before."""
        self.steps.append(step)
        self.state = state
        for reward in (self.reward_of(player) for player in {one.player for one in self.steps if not one.done}):
            if not abs(reward) <= LARGEST_REWARD:
                self.fail("failed", f"gave rewards that add up to {reward:g}, beyond {LARGEST_REWARD:g}")

    def reward_of(self, player: str) -> float:
        """Return what the steps gave a player for its replies, with their named terms, and beyond that."""
        own = [step for before, step in itertools.pairwise(self.steps) if before.player == player]
        more = sum(step.player_rewards.get(player, 0.0) for step in self.steps)
        return sum((step.reward for step in own), 0.0) + sum(self.total("rewards", own).values()) + more

    def total(self, field: str, steps: Sequence[StepResult] | None = None) -> dict[str, float]:
        """Return the sums over steps of their `rewards` or `metrics`, by name. None: over all."""
        totals: Counter[str] = Counter()
        for step in self.steps if steps is None else steps:
            for name, value in getattr(step, field).items():
                totals[name] += value
        return dict(totals)

    @property
    def conversation(self) -> Conversation:
        """Of the player whose turn it is."""
        return self.conversations[self.steps[-1].player]

    def samples(self) -> list[Sample]:
        """Return the samples of all players, with the rewards of those that have names."""
        found = []
        for player, conversation in self.conversations.items():
            reward = self.reward_of(player) if player and not self.failure else None
            found += [dataclasses.replace(one, reward=reward, player=player) for one in conversation.samples()]
        return [sample for sample in found if not sample.player or sample.mask.any()] or found

    def end(self, status: str) -> None:
        self.status, self.ended = status, True

    def fail(self, status: str, reason: str, by_policy: bool = True) -> None:
        """End the episode. `by_policy`: a reply may have caused the failure, if there was one."""
        if not self.ended:
            self.status, self.failure, self.ended = "timeout" if status == "timeout" else "failed", reason, True
            self.is_spared = not (by_policy and self.replies)


class EnvironmentPool(WorkerPool):
    """`environment.num_processes` processes that run environments or agents. A context manager.

    Args:
        most_characters: the contents of an answer of an environment are cut behind this number of characters.
    """

    def __init__(self, config: EnvironmentConfig, most_characters: int = 0):
        super().__init__(
            "trainer.environments.worker:EnvironmentHandler",
            [config.name, dict(config.kwargs), config.timeout_s, most_characters],
            config.num_processes,
            role="environment",
            name=f"environment.name={config.name}",
            limit=("environment.timeout_s", config.timeout_s),
            concurrency=MAX_ASYNC_SESSIONS,
            largest_message=largest_message(most_characters),
        )


class EnvironmentRunner(EpisodeRunner):
    """Runs episodes in which the policy and an environment take turns. The environment gives the reward."""

    def __init__(self, cfg: Config, tokenizer: Any):
        self._config = e = cfg.environment
        self._answer_key = cfg.data.answer_key
        self._seed = cfg.trainer.seed
        self._most_first = cfg.rollout.max_prompt_tokens
        self._longest = e.max_tokens - 1 if e.max_tokens > 0 else self._most_first  # before a reply
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
        turns, seed = asks.turns, environment_seed(self._seed, request.group)
        episode = Session(request.prompt.row, seed, turns.key, turns.recorded_answer)
        try:
            await self._next_answer(episode, asks, together)
            while not episode.ended:
                turn, prompt = len(episode.replies), episode.conversation.token_ids
                completion = await asks(request.of_turn(turn, prompt, self._seed, self._most_tokens), str(turn))
                episode.was_cut = completion.finish_reason == "length"
                episode.replies.append(episode.conversation.add_reply(completion))
                if episode.was_cut or len(episode.replies) == self._config.max_turns:
                    asks.finish()  # whatever the environment answers
                await self._next_answer(episode, asks, together)
        finally:
            episode.fail("failed", "was stopped")  # if it has not ended
            together.begin(episode.close(together))
        return self._ended(request, episode)

    async def _next_answer(self, episode: Session, asks: Asks, together: Any) -> None:
        """Let the environment answer, record that, and add it to the conversation, or end the episode."""
        await episode.answer(together)
        step = episode.steps[-1] if episode.steps else None
        if step is not None and len(episode.steps) > len(episode.replies):
            asks.turns.add_answer(len(episode.replies), step, episode.state)
        if step is None or episode.ended:
            return
        conversation = episode.conversations.get(step.player)
        try:
            if step.done or episode.was_cut or len(episode.replies) == self._config.max_turns:
                if conversation is not None:
                    conversation.messages += step.messages
                episode.end("stop" if step.done else "length" if episode.was_cut else "turns")
            elif conversation is None:
                self._begin(episode, step)
            elif not conversation.add_messages(step.messages, self._longest):
                episode.end("length")
        except UserError as error:  # the chat template refuses the messages
            episode.fail("failed", f"gave messages that have no tokens: {error}")

    def _begin(self, episode: Session, step: StepResult) -> None:
        """Begin the conversation of a player. Episodes of one prompt mostly have the same messages, written once."""
        text = json.dumps(step.messages)  # what is rendered differs for 1 and True, and with the order of keys
        try:
            if self._begun is None or self._begun[0] != text:
                self._begun = text, Conversation(self._tokenizer, step.messages, self._limit, self._reader)
            episode.conversations[step.player] = self._begun[1].fork()
            length = len(episode.conversation.token_ids)
            size = f"{length} tokens" if length > self._most_first else ""
        except TextTooLong as error:
            size = str(error)
        if size:
            limit = f"rollout.max_prompt_tokens is {self._most_first}"
            episode.fail("failed", f"has first messages of {size}; {limit}")

    def _ended(self, request: RolloutRequest, episode: Session) -> Episode:
        samples = episode.samples()
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
