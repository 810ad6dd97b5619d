"""Play episodes and get their rewards: engines, environments and reward processes behind one call."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from trainer.config import Config
from trainer.data.datasets import Prompt
from trainer.environments.episode_runner import (
    Attempt,
    Clock,
    EnvironmentPlayer,
    Played,
    Player,
    SingleTurn,
    report_failures,
)
from trainer.generation.engine import Completion, Request, Sampling
from trainer.generation.engine_pool import EnginePool
from trainer.metrics.samples import Transcript, split_conversation
from trainer.rewards.cache import RewardCache
from trainer.rewards.parsing import Parts
from trainer.rewards.pool import RewardPool
from trainer.rewards.scores import RewardFailures, Scores
from trainer.rewards.terms import RewardInput


@dataclass(frozen=True)
class Judged:
    """An episode with its reward."""

    played: Played
    reward: float | None
    """None: it failed, and is left out."""
    parts: Parts
    """What the reward consists of."""
    failure: str
    """Why the reward, or a part of it, or the environment failed. Empty: it did not."""


class Playing:
    """Plays episodes and gets their rewards. A context manager.

    Args:
        fleet: the engines.
        stop_tokens: end a completion.
        store: of rewards. It is not used with an environment, which gives the rewards itself.
    """

    def __init__(
        self, cfg: Config, fleet: EnginePool, tokenizer: Any, stop_tokens: tuple[int, ...], store: RewardCache
    ):
        self.cfg = cfg
        self.fleet = fleet
        self._stop_tokens = stop_tokens
        self._player: Player = (EnvironmentPlayer if cfg.environment.name else SingleTurn)(cfg, tokenizer)
        self.rewards = None if cfg.environment.name else RewardPool(cfg.reward, store)
        self.largest_reward = -math.inf

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._player)
            if self.rewards is not None:
                stack.enter_context(self.rewards)
            self._processes = stack.pop_all()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._processes.close()

    def play(
        self,
        attempts: Sequence[Attempt],
        sampling: Sampling,
        prompts: Sequence[Prompt],
        purpose: str,
        clock: Clock = contextlib.nullcontext,
    ) -> list[Judged]:
        """Play episodes, and compute the rewards of those that have ended meanwhile.

        Args:
            attempts: as many for each of `prompts`, those of one prompt together.
            purpose: names what the episodes are for, in messages.
            clock: the timer of the step. Evaluation is not timed.
        """

        def generate(requests: Sequence[Request]) -> Iterator[dict[int, Completion]]:
            parts = self.fleet.stream(requests, sampling)
            while True:
                with clock("rollout"):
                    part = next(parts, None)
                if part is None:
                    return
                yield part

        parts = self._player.play(attempts, generate, clock)
        played: dict[int, Played] = {}
        if self.rewards is None:
            for part in parts:
                played |= part
            scores = _environment_scores(played, self.cfg.environment.on_failure, purpose)
        else:
            n = len(attempts) // len(prompts)
            with self.rewards.judging(n, purpose) as judging:
                for part in parts:
                    played |= part
                    for group in sorted({place // n for place in part}):
                        places = range(group * n, group * n + n)
                        if all(place in played for place in places):
                            judging.add(places.start, [_input(prompts[group], played[place]) for place in places])
                with clock("reward"):
                    scores = judging.scores()
        leaves_out = self.cfg.on_failure == "leave_out"
        rewards = [
            None if reason and leaves_out else reward
            for reward, reason in zip(scores.rewards, scores.reasons, strict=True)
        ]
        self.largest_reward = max([self.largest_reward, *(reward for reward in rewards if reward is not None)])
        return [
            Judged(played[place], rewards[place], scores.parts[place], scores.reasons[place])
            for place in range(len(attempts))
        ]

    def sampling(self, temperature: float, top_p: float, top_k: int) -> Sampling:
        return Sampling(temperature, top_p, top_k, self.cfg.rollout.max_response_tokens, self._stop_tokens)

    def greedy(self) -> Sampling:
        return self.sampling(0.0, 1.0, -1)

    def transcript(self, prompt: Prompt, judged: Judged, uid: str, number: int) -> Transcript:
        """Return an episode as text."""
        played, given = judged.played, (judged.reward, judged.parts, judged.played.status, judged.failure)
        if self.rewards is not None:
            reply = {"role": "assistant", "content": played.text}
            return Transcript(uid, number, prompt.messages, [reply], prompt.answer, *given)
        before, after = split_conversation(played.messages, played.turns)
        answer = prompt.row.get(self.cfg.data.answer_key)
        answer = "" if answer is None else str(answer)
        return Transcript(uid, number, before, after, answer, *given, played.metrics)


def means(name: str, values: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the metrics `{name}/{part}/mean`. A part that one of the values lacks counts as 0 there."""
    names = sorted({part for of_one in values for part in of_one})
    return {f"{name}/{part}/mean": sum(of_one.get(part, 0.0) for of_one in values) / len(values) for part in names}


def known_parts(judged: Sequence[Judged]) -> list[Parts]:
    """Return the parts of the rewards that are not left out."""
    return [one.parts for one in judged if one.reward is not None]


def _environment_scores(played: Mapping[int, Played], on_failure: str, purpose: str) -> Scores:
    """Return the rewards that environments gave, in the order of the attempts."""
    episodes = [played[place] for place in range(len(played))]
    rewards = [episode.reward or 0.0 for episode in episodes]
    reasons = [episode.failure for episode in episodes]
    failures = RewardFailures(report_failures(episodes, on_failure, purpose))
    return Scores(rewards, [dict(episode.rewards) for episode in episodes], reasons, failures)


def _input(prompt: Prompt, played: Played) -> RewardInput:
    """Return an episode of one completion as a reward sees it."""
    messages = [*prompt.messages, {"role": "assistant", "content": played.text}]
    return RewardInput(played.text, prompt.answer, prompt.text, messages, prompt.row, played.status)
