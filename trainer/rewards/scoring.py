"""Rewards are computed in their own processes: one that hangs or crashes costs one completion."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any

from trainer.config import RewardConfig
from trainer.errors import UserError
from trainer.files.documents import mismatch
from trainer.rewards.cache import Result, RewardCache
from trainer.rewards.parsing import Terms
from trainer.rewards.scorer import OnRanks, Scoring
from trainer.rewards.scores import Scores, aggregate
from trainer.rewards.terms import Call, RewardFunction, RewardInput, reward_functions
from trainer.sandbox.pool import WorkerPool
from trainer.sandbox.process import ProcessDied
from trainer.sandbox.tasks import AsyncCalls, Round, Task

LOG = logging.getLogger(__name__)


class RewardPool(WorkerPool):
    """A `Scorer`: `reward.num_processes` processes that call reward functions. A context manager.

    Args:
        cache: of results that are not computed again.

    Raises:
        UserError: there is no such reward, or it wants what no reward gets.
    """

    uses_ranks = False

    def __init__(self, config: RewardConfig, cache: RewardCache | None = None):
        self.functions = reward_functions(config)  # a wrong name fails here, not at the first step
        self._config = config
        self._cache = cache
        remote = {"url": config.url, "timeout_s": config.timeout_s, "authorization_env": config.authorization_env}
        super().__init__(
            "trainer.rewards.worker:RewardHandler",
            [config.names(), config.timeout_s, remote],
            config.num_processes,
            role="reward",
            name=config.key(),
            limit=("reward.timeout_s", max(function.limit_s for function in self.functions)),
            concurrency=config.concurrency,
        )

    @property
    def wants_groups(self) -> bool:
        """Whether a function judges the completions of a group together, or a server gets several in a request."""
        return any(function.signature.grouped or function.batch > 1 for function in self.functions)

    def score(self, inputs: Sequence[RewardInput], n: int = 1, step: str = "") -> Scores:
        """Return the rewards of completions that are all there (see `scoring`).

        Raises:
            UserError: more than `reward.max_error_rate` of them have failed.
        """
        with self.scoring(n, step) as session:
            session.add(0, inputs)
            scores = session.scores()
        problem = scores.failures.problem(len(inputs), self._config.max_error_rate, step)
        if problem is not None:
            raise UserError(problem)
        for line in scores.failures.lines(len(inputs), self._config.on_failure, step):
            LOG.warning(line)
        scores.accept()
        return scores

    @asynccontextmanager
    async def open(self, purpose: str, groups: int, on_ranks: OnRanks) -> AsyncIterator[Scoring]:
        """Compute rewards in the block, on an event loop (see `Scorer.open`)."""
        async with self.calls() as calls:
            yield _GroupScoring(self.functions, self._cache, calls, purpose)

    @contextmanager
    def scoring(self, n: int = 1, purpose: str = "") -> Iterator[ScoringSession]:
        """Compute rewards while the block runs. Several threads may each run such a block.

        Args:
            n: completions in a group.
            purpose: names what the rewards are for, in the cache.
        """
        with self.round() as tasks:
            yield ScoringSession(self.functions, self._cache, tasks, n, purpose)


class ScoringSession:
    """Rewards of completions that arrive one after another (see `RewardPool.scoring`)."""

    def __init__(
        self,
        functions: list[RewardFunction],
        cache: RewardCache | None,
        tasks: Round | None,
        n: int,
        step: str,
    ):
        self._cache = cache
        self._round = tasks
        self._n = n
        self._step = step
        self._calls: dict[RewardFunction, list[Call]] = {function: [] for function in functions}
        self._tasks: list[_RewardTask] = []
        self._cached: dict[str, Result] = {}
        self._asked: set[str] = set()
        self._total = 0

    def add(self, first: int, inputs: Sequence[RewardInput]) -> None:
        """Begin to compute the rewards of completions.

        Args:
            first: index of the first one.
            inputs: whole groups, one after another; any completions if no function wants groups.

        Raises:
            WorkerError: the processes cannot start.
        """
        assert self._round is not None
        self._round.submit(self._begin(first, inputs))

    def _begin(self, first: int, inputs: Sequence[RewardInput]) -> list[_RewardTask]:
        self._total += len(inputs)
        tasks = []
        for index, (function, calls) in enumerate(self._calls.items()):
            group = function.calls(inputs, self._n, first)
            calls += group
            new = [call for call in group if self._is_new(call)]
            some = [new[i : i + function.batch] for i in range(0, len(new), function.batch)]
            tasks += [_RewardTask(index, function, calls_of_one) for calls_of_one in some]
        self._tasks += tasks
        return tasks

    def _is_new(self, call: Call) -> bool:
        """Whether the call must be made: its result is not cached, and no earlier call is the same."""
        if call.key is None:
            return True
        if call.key in self._asked:
            return False
        self._asked.add(call.key)
        result = self._cache.find(call.key, self._step) if self._cache is not None else None
        if result is not None:
            self._cached[call.key] = result
        return result is None

    def finished(self) -> dict[int, tuple[float, Terms, str]]:
        """Return reward, terms and reason of each completion whose rewards are all known so far, by its index.

        Results that did not fail are cached.
        """
        known = self._known_results()
        results: dict[RewardFunction, dict[Call, Result]] = {}
        missing: set[int] = set()
        for function, calls in self._calls.items():
            results[function] = {call: known[call.key or call] for call in calls if (call.key or call) in known}
            missing.update(index for call in calls if (call.key or call) not in known for index in call.indices)
        self._store(results, failures=False)
        indices = {index for calls in self._calls.values() for call in calls for index in call.indices}
        each = aggregate(results, max(indices, default=-1) + 1).each()
        return {index: each[index] for index in sorted(indices - missing)}

    def results(self, meanwhile: Callable[[], None] = lambda: None) -> dict[RewardFunction, dict[Call, Result]]:
        """Wait for the result of each call of each reward. No completions can follow.

        Args:
            meanwhile: called again and again.
        """
        assert self._round is not None
        self._round.wait(meanwhile)
        return self._results()

    def _results(self) -> dict[RewardFunction, dict[Call, Result]]:
        known = self._known_results()
        return {
            function: {call: known[call.key or call] for call in sorted(calls, key=lambda call: call.indices)}
            for function, calls in self._calls.items()
        }

    def _known_results(self) -> dict[Call | str, Result]:
        """Return the results so far, by the keys of their calls, or by the calls that have none."""
        made = {
            call.key or call: result
            for task in list(self._tasks)
            if (results := task.results)
            for call, result in zip(task.calls, results, strict=True)
        }
        return {**self._cached, **made}

    def scores(self, meanwhile: Callable[[], None] = lambda: None) -> Scores:
        """Wait for the rewards of all completions. One that raises, hangs or is no number has failed.

        Failures are cached when the rewards are accepted: until then, a repaired reward may be asked again.

        Args:
            meanwhile: called again and again.

        Raises:
            WorkerError: the processes cannot start.
        """
        return self._scores(self.results(meanwhile))

    async def scored(self, inputs: Sequence[RewardInput], calls: AsyncCalls) -> Scores:
        """Return the rewards of completions, on an event loop."""
        await asyncio.gather(*map(calls.do, self._begin(0, inputs)))
        return self._scores(self._results())

    def _scores(self, results: dict[RewardFunction, dict[Call, Result]]) -> Scores:
        self._store(results, failures=False)
        scores = aggregate(results, self._total)
        scores.accept = partial(self._store, results, failures=True)
        return scores

    def _store(self, results: dict[RewardFunction, dict[Call, Result]], failures: bool) -> None:
        """Cache the results of calls with a key. `failures`: those of failed calls too."""
        if self._cache is None:
            return
        computed = {call.key: result for calls in results.values() for call, result in calls.items() if call.key}
        chosen = [key for key in computed if key not in self._cached and (failures or not _has_failed(computed[key]))]
        self._cache.add({key: computed[key] for key in chosen}, self._step)
        self._cached |= {key: computed[key] for key in chosen}


class _GroupScoring:
    """The rewards of groups that begin together (see `Scoring`)."""

    def __init__(self, functions: list[RewardFunction], cache: RewardCache | None, calls: AsyncCalls, purpose: str):
        self._functions, self._cache, self._calls, self._purpose = functions, cache, calls, purpose

    async def score(self, order: int, inputs: Sequence[RewardInput]) -> Scores:
        session = ScoringSession(self._functions, self._cache, None, len(inputs), self._purpose)
        return await session.scored(inputs, self._calls)


class _RewardTask(Task):
    """Calls of one reward that a process makes as one batch: one, or several for a server."""

    def __init__(self, index: int, function: RewardFunction, calls: list[Call]):
        super().__init__()
        self.kind = function
        self.is_async = function.signature.is_async
        self.limit = function.limit
        self.calls = calls
        self._function = function
        self.results: list[Result] = []
        """For each call; empty until there is a result."""
        self._index = index

    @property
    def label(self) -> str:
        return self._function.label

    def next_call(self) -> list[Any] | None:
        return None if self.results else [self._index, [call.given for call in self.calls]]

    def take(self, value: Any) -> bool:
        lengths = [len(call.indices) for call in self.calls]
        if mismatch(value, [[(dict, str)]]) is not None or [len(result) for result in value] != lengths:
            raise ProcessDied
        self.results = value
        return any(map(_has_failed, value))

    def fail(self, status: str, reason: str) -> None:
        self.results = [[reason] * len(call.indices) for call in self.calls]


def _has_failed(result: Result) -> bool:
    return any(isinstance(terms, str) for terms in result)
