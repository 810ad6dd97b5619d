"""Rewards are computed in their own processes: one that hangs or crashes costs one completion."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from trainer.config import REWARD_MODEL, Config, RewardConfig
from trainer.errors import UserError
from trainer.files.documents import mismatch
from trainer.rewards.cache import RewardCache, key_of
from trainer.rewards.functions import REMOTE, resolve
from trainer.rewards.parsing import Result, Terms
from trainer.rewards.scorer import OnRanks, RewardInput, Scorer, Scores, Scoring, ServerScorer
from trainer.rewards.signature import RewardSignature, signature_of
from trainer.sandbox import limits, pool
from trainer.sandbox.pool import Calls, WorkerPool

COMPLETIONS_PER_REQUEST = 16  # most completions in a request to `reward.url`


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
    """Return the rewards of the config. Raises UserError: one of them does not exist, or wants what no reward gets."""
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


Results = dict[RewardFunction, dict[Call, Result]]  # the result of each call of each reward


def make_scorer(cfg: Config, cache: RewardCache) -> Scorer:
    """Return what gives the rewards of a config without ranks: a reward model on a server, or the reward functions.
    Raises UserError: there is no such reward, or it wants what no reward gets."""
    model = next((spec for spec in cfg.servers if spec.name == REWARD_MODEL), None)
    return RewardPool(cfg.reward, cache) if model is None else ServerScorer(model.name, model.server, cache)


class RewardPool(WorkerPool):
    """A `Scorer`: `reward.num_processes` processes that call reward functions. A context manager. Raises UserError:
    there is no such reward, or it wants what no reward gets."""

    uses_ranks = False

    def __init__(self, config: RewardConfig, cache: RewardCache | None = None):
        self.functions = reward_functions(config)  # a wrong name fails here, not at the first step
        self._url, self._cache = config.url or "", cache
        remote = {"url": config.url, "timeout_s": config.timeout_s, "authorization_env": config.authorization_env}
        super().__init__(
            "trainer.rewards.worker:RewardHandler",
            [config.names(), config.timeout_s, remote],
            config.num_processes,
            role="reward",
            name=config.key(),
            limit=("reward.timeout_s", config.timeout_s),
            concurrency=config.concurrency,
        )

    @property
    def wants_groups(self) -> bool:
        """Whether a function judges the completions of a group together, or a server gets several in a request."""
        return any(function.signature.grouped or function.batch > 1 for function in self.functions)

    @asynccontextmanager
    async def open(self, purpose: str, groups: int, on_ranks: OnRanks) -> AsyncIterator[Scoring]:
        async with self.calls() as calls:
            yield _GroupScoring(self, calls)

    async def results(self, inputs: Sequence[RewardInput], n: int, calls: Calls) -> Results:
        """Return the result of each call of each reward. `n`: completions in a group."""
        made = [function.calls(inputs, n) for function in self.functions]
        results = await asyncio.gather(*(self._results_of(index, some, calls) for index, some in enumerate(made)))
        return {
            function: dict(zip(some, found, strict=True))
            for function, some, found in zip(self.functions, made, results, strict=True)
        }

    async def _results_of(self, index: int, made: Sequence[Call], calls: Calls) -> list[Result]:
        """Return the results of the calls of one reward. A server is asked once for the same content."""
        function = self.functions[index]
        cache = self._cache if function.name == REMOTE else None
        keys = [str(i) if cache is None else key_of(self._url, call.given) for i, call in enumerate(made)]
        known = {} if cache is None else cache.find(keys)
        missing = {key: call for key, call in zip(keys, made, strict=True) if key not in known}
        asked = list(missing.values())
        batches = [asked[i : i + function.batch] for i in range(0, len(asked), function.batch)]
        results = await asyncio.gather(*(self._make(index, batch, calls) for batch in batches))
        new = dict(zip(missing, itertools.chain.from_iterable(results), strict=True))
        if cache is not None:
            await asyncio.to_thread(cache.add, new)
        return [new[key] if key in new else known[key] for key in keys]

    async def _make(self, index: int, batch: Sequence[Call], calls: Calls) -> list[Result]:
        """Make calls of one reward that a process makes as one: one call, or several for a server."""
        function, lengths = self.functions[index], [len(call.indices) for call in batch]
        message = [index, [call.given for call in batch]]
        try:
            value = await calls.do(pool.Call(message, function.label, is_async=function.signature.is_async))
        except pool.CallFailed as failed:
            return [[failed.reason] * length for length in lengths]
        if mismatch(value, [[(dict, str)]]) is not None or [len(result) for result in value] != lengths:
            return [["has written into the pipe of its process"] * length for length in lengths]
        return value


@dataclass(frozen=True)
class _GroupScoring:
    """The rewards of groups that begin together (see `Scoring`)."""

    pool: RewardPool
    calls: Calls

    async def score(self, order: int, inputs: Sequence[RewardInput]) -> Scores:
        """Return the rewards of completions of one group. One that raises, hangs or is no number has failed."""
        return aggregate(await self.pool.results(inputs, len(inputs), self.calls), len(inputs))
