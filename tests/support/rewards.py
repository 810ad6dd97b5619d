"""Pools of reward processes for tests, and completions to judge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainer.config import RewardConfig
from trainer.rewards.cache import RewardCache
from trainer.rewards.functions import REWARDS
from trainer.rewards.scores import Failures
from trainer.rewards.scoring import RewardPool
from trainer.rewards.terms import RewardInput

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


def reward_pool(
    name: str | list[str], timeout_s: float = 30, num_processes: int = 1, kept: RewardCache | None = None, **more: Any
) -> RewardPool:
    """A pool that continues whatever fails. `kept` is its cache; `more` are further keys of `reward`."""
    settings = {"max_error_rate": 1.0, **more}
    return RewardPool(RewardConfig(name=name, timeout_s=timeout_s, num_processes=num_processes, **settings), kept)


def score(
    pool: RewardPool,
    completions: Sequence[str],
    answers: Sequence[str],
    rows: Sequence[Mapping[str, Any]] | None = None,
) -> tuple[list[float], Failures]:
    """The rewards of completions that are a group each, and the failures."""
    given = zip(completions, answers, rows or [{}] * len(completions), strict=True)
    scores = pool.score([RewardInput(completion, answer, row=row) for completion, answer, row in given])
    return scores.rewards, scores.failures
