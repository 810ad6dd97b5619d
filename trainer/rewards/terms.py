"""The reward functions of a run, and the calls that each one needs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.config import RewardConfig
from trainer.episodes import Episode
from trainer.errors import UserError
from trainer.rewards.cache import key_of
from trainer.rewards.functions import REMOTE, resolve
from trainer.rewards.signature import RewardSignature, signature_of

COMPLETIONS_PER_REQUEST = 16
"""Most completions in a request to `reward.url`."""


@dataclass(frozen=True)
class RewardInput:
    """A completion to score, with all that a reward may ask for."""

    completion: str
    answer: str
    prompt: str = ""
    messages: Sequence[Mapping[str, Any]] = ()
    row: Mapping[str, Any] = field(default_factory=dict)
    status: str = "stop"
    episode: Episode | None = None
    """With its tokens, for a scorer that reads them. Reward functions get the text."""


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a reward: for a completion, or for a group of completions."""

    indices: tuple[int, ...]
    """The completions, by their index in the list."""
    given: dict[str, Any]
    """What the reward gets, by name."""
    key: str | None
    """Its key in the cache; None: its result is not cached."""


@dataclass(frozen=True, eq=False)
class RewardFunction:
    """One of the rewards that `reward.name` names."""

    name: str
    """As `reward.name` has it."""
    label: str
    """Its name in metrics."""
    weight: float
    signature: RewardSignature
    cached_as: str | None
    """Its name in the keys of the cache; None: its results are not cached."""
    limit_s: float
    """Longest time for one call."""
    batch: int = 1
    """Calls that a process makes as one batch."""

    def calls(self, inputs: Sequence[RewardInput], n: int, first: int = 0) -> list[Call]:
        """Return the calls that score `inputs`, of which `n` after one another are a group.

        Args:
            first: index of the first one.
        """
        size = n if self.signature.grouped else 1
        calls = []
        for start in range(0, len(inputs), size):
            indices = tuple(range(first + start, first + start + size))
            given = self._given(inputs[start : start + size])
            calls.append(Call(indices, given, key_of(self.cached_as, given) if self.cached_as else None))
        return calls

    def _given(self, inputs: Sequence[RewardInput]) -> dict[str, Any]:
        first, names = inputs[0], self.signature.wanted
        if not self.signature.grouped:
            return {name: getattr(first, name) for name in names}
        group = {
            "completions": [item.completion for item in inputs],
            "messages": [item.messages for item in inputs],
            "status": [item.status for item in inputs],
        }
        return {name: group[name] if name in group else getattr(first, name) for name in names}

    @property
    def limit(self) -> tuple[str, float]:
        """The key of the time limit, and its value."""
        return "reward.timeout_s", self.limit_s


def reward_functions(config: RewardConfig) -> list[RewardFunction]:
    """Return the rewards of the config.

    Raises:
        UserError: one of them does not exist, or wants what no reward gets.
    """
    names = config.names()
    weights = config.weights or [1.0] * len(names)
    labels = _labels(names)
    return [_reward_function(config, *item) for item in zip(names, labels, weights, strict=True)]


def _reward_function(config: RewardConfig, name: str, label: str, weight: float) -> RewardFunction:
    if name == REMOTE:
        from trainer.rewards.remote import RemoteReward

        if config.authorization_env and not os.environ.get(config.authorization_env, "").strip():
            raise UserError(
                f"reward.authorization_env={config.authorization_env}: the environment has no such variable; set it to "
                "the value of the header Authorization"
            )
        signature, limit_s = RemoteReward.signature, config.timeout_s
        return RewardFunction(name, label, weight, signature, config.url, limit_s, COMPLETIONS_PER_REQUEST)
    signature = signature_of(resolve(name), f"reward.name={name}")
    return RewardFunction(name, label, weight, signature, None, config.timeout_s)


def _labels(names: Sequence[str]) -> list[str]:
    """Return the names of the functions, without their modules where that is clear."""
    short = [name.replace(":", ".").rpartition(".")[2] for name in names]
    return [
        label if short.count(label) == 1 else name.replace(":", ".") for label, name in zip(short, names, strict=True)
    ]
