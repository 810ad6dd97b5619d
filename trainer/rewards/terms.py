"""The rewards of a run: which calls each one needs, and what they add up to."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.config import RewardConfig
from trainer.errors import UserError
from trainer.rewards.cache import key_of
from trainer.rewards.functions import REMOTE, resolve
from trainer.rewards.signature import RewardSignature, calling_of


@dataclass(frozen=True)
class RewardInput:
    """A completion to judge, with all that a reward may ask for."""

    completion: str
    answer: str
    prompt: str = ""
    messages: Sequence[Mapping[str, Any]] = ()
    row: Mapping[str, Any] = field(default_factory=dict)
    status: str = "stop"


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a reward: for a completion, or for a group of completions."""

    indices: tuple[int, ...]
    """The completions, by their place in the list."""
    given: dict[str, Any]
    """What the reward gets, by name."""
    key: str | None
    """Its key in the store; None: its result is not stored."""


@dataclass(frozen=True, eq=False)
class RewardFunction:
    """One of the rewards that `reward.name` names."""

    name: str
    """As `reward.name` has it."""
    label: str
    """Its name in metrics."""
    weight: float
    calling: RewardSignature
    stored_as: str | None
    """What names it in the keys of the store; None: its results are not stored."""
    limit_s: float
    """Longest time for one call."""
    batch: int = 1
    """Calls that a process makes in one go."""

    def calls(self, attempts: Sequence[RewardInput], n: int, first: int = 0) -> list[Call]:
        """Return the calls that judge `attempts`, of which `n` after one another are a group.

        Args:
            first: place of the first attempt.
        """
        size = n if self.calling.grouped else 1
        calls = []
        for start in range(0, len(attempts), size):
            indices = tuple(range(first + start, first + start + size))
            given = self._given(attempts[start : start + size])
            calls.append(Call(indices, given, key_of(self.stored_as, given) if self.stored_as else None))
        return calls

    def _given(self, attempts: Sequence[RewardInput]) -> dict[str, Any]:
        first, names = attempts[0], self.calling.wanted
        if not self.calling.grouped:
            return {name: getattr(first, name) for name in names}
        group = {
            "completions": [attempt.completion for attempt in attempts],
            "messages": [attempt.messages for attempt in attempts],
            "status": [attempt.status for attempt in attempts],
        }
        return {name: group[name] if name in group else getattr(first, name) for name in names}

    @property
    def limit(self) -> tuple[str, float]:
        """The key of the time limit, and its value."""
        return ("reward.remote.deadline_s" if self.name == REMOTE else "reward.timeout_s"), self.limit_s


def components_of(config: RewardConfig) -> list[RewardFunction]:
    """Return the rewards of the config.

    Raises:
        UserError: one of them does not exist, or wants what no reward gets.
    """
    names = config.names()
    weights = config.weights or [1.0] * len(names)
    labels = _labels(names)
    return [_component(config, *item) for item in zip(names, labels, weights, strict=True)]


def _component(config: RewardConfig, name: str, label: str, weight: float) -> RewardFunction:
    if name == REMOTE:
        from trainer.rewards.remote import RemoteReward

        remote = config.remote
        if remote.header_env and not os.environ.get(remote.header_env, "").strip():
            raise UserError(
                f"reward.remote.header_env={remote.header_env}: the environment has no such variable; set it to the "
                f"value of the header {remote.header}"
            )
        return RewardFunction(
            name, label, weight, RemoteReward.calling, config.url, remote.deadline_s, remote.completions_per_request
        )
    calling = calling_of(resolve(name), f"reward.name={name}")
    return RewardFunction(name, label, weight, calling, name if config.cache else None, config.timeout_s)


def _labels(names: Sequence[str]) -> list[str]:
    """Return the names of the functions, without their modules where that is clear."""
    short = [name.replace(":", ".").rpartition(".")[2] for name in names]
    return [
        label if short.count(label) == 1 else name.replace(":", ".") for label, name in zip(short, names, strict=True)
    ]
