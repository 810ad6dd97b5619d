"""Pools of reward processes for tests, and completions to judge."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.config import RewardConfig
from trainer.rewards.cache import RewardCache
from trainer.rewards.functions import REWARDS
from trainer.rewards.scorer import RewardInput, Scores
from trainer.rewards.scoring import Results, RewardPool, aggregate

HOME = "tests.support.named_rewards"


def attempts(*completions: str) -> list[RewardInput]:
    """Inputs with all that a reward can name, a row each."""
    return [
        RewardInput(
            completion,
            answer="5",
            prompt="why?",
            messages=[{"role": "user", "content": "why?"}, {"role": "assistant", "content": completion}],
            row={"points": 3},
            status="length" if completion == "cut" else "stop",
        )
        for completion in completions
    ]


def full(name: str) -> str:
    """The import path of a function of `named_rewards`, or the name of a built-in reward."""
    return name if name in REWARDS else f"{HOME}:{name}"


@dataclass
class Failures:
    """How many rewards have failed, and why the first one has."""

    count: int
    first: str


@dataclass
class Judged(Scores):
    """Rewards, with a count of their failures."""

    failures: Failures


def reward_pool(
    name: str | list[str], timeout_s: float = 30, num_processes: int = 1, kept: RewardCache | None = None, **more: Any
) -> RewardPool:
    """A pool. `kept` is its cache; `more` are further keys of `reward`."""
    return RewardPool(RewardConfig(name=name, timeout_s=timeout_s, num_processes=num_processes, **more), kept)


def judge(pool: RewardPool, inputs: Sequence[RewardInput], n: int = 1) -> Judged:
    """The rewards of completions, of which `n` after one another are a group."""

    async def results() -> Results:
        async with pool.calls() as calls:
            return await pool.results(inputs, n, calls)

    scores = aggregate(asyncio.run(results()), len(inputs))
    reasons = [reason for reason in scores.reasons if reason]
    return Judged(scores.rewards, scores.terms, scores.reasons, Failures(len(reasons), "".join(reasons[:1])))


def score(
    pool: RewardPool,
    completions: Sequence[str],
    answers: Sequence[str],
    rows: Sequence[Mapping[str, Any]] | None = None,
) -> tuple[list[float], Failures]:
    """The rewards of completions that are a group each, and the failures."""
    given = zip(completions, answers, rows or [{}] * len(completions), strict=True)
    scores = judge(pool, [RewardInput(completion, answer, row=row) for completion, answer, row in given])
    return scores.rewards, scores.failures
