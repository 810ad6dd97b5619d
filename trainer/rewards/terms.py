"""The reward functions of a run, and the calls that each one needs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.config import RewardConfig
from trainer.episodes import Episode
from trainer.errors import UserError
from trainer.rewards.functions import REMOTE, resolve
from trainer.rewards.parsing import Terms
from trainer.rewards.signature import RewardSignature, signature_of
from trainer.sandbox import limits

COMPLETIONS_PER_REQUEST = 16  # most completions in a request to `reward.url`


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
    indices: tuple[int, ...]  # the completions, by their index in the list
    given: dict[str, Any]  # what the reward gets, by name


@dataclass(frozen=True, eq=False)
class RewardFunction:
    name: str  # as `reward.name` has it
    label: str  # its name in metrics
    weight: float
    signature: RewardSignature
    batch: int = 1  # calls that a process makes as one batch

    def calls(self, inputs: Sequence[RewardInput], n: int) -> list[Call]:
        """Return the calls that score `inputs`, of which `n` after one another are a group."""
        size, calls = n if self.signature.grouped else 1, []
        for start in range(0, len(inputs), size):
            some, group = inputs[start : start + size], {}
            if self.signature.grouped:
                names = {"completions": "completion", "messages": "messages", "status": "status"}
                group = {name: [getattr(item, one) for item in some] for name, one in names.items()}
            wanted = self.signature.wanted
            given = {name: group[name] if name in group else getattr(some[0], name) for name in wanted}
            calls.append(Call(tuple(range(start, start + size)), given))
        return calls


def reward_functions(config: RewardConfig) -> list[RewardFunction]:
    """Return the rewards of the config. UserError: one of them does not exist, or wants what no reward gets."""
    names, functions = config.names(), []
    short = [name.replace(":", ".").rpartition(".")[2] for name in names]
    for name, last, weight in zip(names, short, config.weights or [1.0] * len(names), strict=True):
        label = last if short.count(last) == 1 else name.replace(":", ".")  # without the module where that is clear
        if name == REMOTE:
            from trainer.rewards.remote import RemoteReward

            if config.authorization_env and not os.environ.get(config.authorization_env, "").strip():
                raise UserError(
                    f"reward.authorization_env={config.authorization_env}: the environment has no such variable; set "
                    "it to the value of the header Authorization"
                )
            functions.append(RewardFunction(name, label, weight, RemoteReward.signature, COMPLETIONS_PER_REQUEST))
        else:
            signature = signature_of(resolve(name), f"reward.name={name}")
            functions.append(RewardFunction(name, label, weight, signature))
    return functions


Result = list[Terms | str]
"""For each completion of a call: the terms of its reward, or the reason why it has none."""


@dataclass
class Scores:
    rewards: list[float]  # where a reward failed: 0, or the sum of the terms that did not fail
    terms: list[Terms]  # the terms of each reward, before they are weighed
    reasons: list[str]  # why each reward failed; empty for one that did not

    def each(self) -> list[tuple[float, Terms, str]]:
        return list(zip(self.rewards, self.terms, self.reasons, strict=True))


def aggregate(results: Mapping[RewardFunction, Mapping[Call, Result]], total: int) -> Scores:
    """Return the weighted sums of all rewards for `total` completions. A term of the name that another reward has given
    already is a failure."""
    rewards, terms, reasons = [0.0] * total, [Terms() for _ in range(total)], [""] * total
    for function, group in results.items():
        for call, result in group.items():
            for index, value in zip(call.indices, result, strict=True):
                named = _named(function, value, terms[index])
                if isinstance(named, str):
                    prefix = f"{function.label}: " if len(results) > 1 else ""
                    reasons[index] = reasons[index] or prefix + named
                else:
                    terms[index] |= named
                    rewards[index] += function.weight * sum(named.values())
    for index, reward in enumerate(rewards):
        if not abs(reward) <= limits.LARGEST_REWARD:  # infinite weights make it NaN
            reasons[index] = reasons[index] or f"is {reward:g}, beyond {limits.LARGEST_REWARD:g}"
            rewards[index] = 0.0
    return Scores(rewards, terms, reasons)


def _named(function: RewardFunction, value: Terms | str, others: Terms) -> Terms | str:
    """Return the terms by their names in metrics, or the reason why there are none."""
    if isinstance(value, str):
        return value
    named = {name or function.label: number for name, number in value.items()}
    double = next((name for name in named if name in others), None)
    return named if double is None else f"returned a term {double}, as another reward does"
