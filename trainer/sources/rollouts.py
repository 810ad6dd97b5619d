"""The road of a rollout: one coroutine a group looks into the journal, runs what is missing, scores and records it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Self

from trainer.config import Config
from trainer.data.datasets import name_in_mix, of_source
from trainer.data.records import key_of_episode
from trainer.data.row_files import digest_rows
from trainer.environments.episode_runner import EpisodeRunner, RolloutRequest
from trainer.environments.turns import EpisodeTurns, reply_name
from trainer.episodes import Episode
from trainer.errors import UserError
from trainer.generation.engine import Completion, Request, Sampling
from trainer.generation.engine_pool import EnginePool
from trainer.generation.event_loop import all_of
from trainer.journal.journal import Journal
from trainer.journal.turns import TurnRecord
from trainer.process import time_limits
from trainer.process.signals import CONTINUES
from trainer.rewards.scorer import RewardInput, Scoring
from trainer.sources.routes import Route

LOG = logging.getLogger(__name__)

_FEWEST_ROWS = 4  # of a source, whose failures say that the source is broken and not a row
_OUTCOMES = {
    ("reward", "leave_out"): "are left out",
    ("reward", "zero"): "count as 0",
    ("environment", "leave_out"): "have a reward of 0, or are left out if the policy had not replied",
    ("environment", "zero"): "count as 0",
}
"""What becomes of failures, by the section of the config that gives the rewards, and its `on_failure`."""


class Group:
    """The episodes of one prompt that are asked for together, and their records in the journal.

    Args:
        requests: of the episodes.
        history: of the weights that sample them.
        is_whole: they have one record together. Else each has its own.
        step: the step that trains on them, as their keys have it.
    """

    def __init__(
        self,
        journal: Journal,
        requests: Sequence[RolloutRequest],
        route: Route,
        history: str,
        is_whole: bool,
        step: int,
    ):
        self.journal, self.requests, self.route, self.step = journal, requests, route, step
        self.order = 0  # among those that begin together
        self.found: dict[int, Episode] = {}
        """Those that the journal had, by the indices of their requests."""
        self.made: dict[int, Episode] = {}  # those that were run, with their rewards
        self.asks: dict[int, _Asks] = {}  # how those that run ask for replies
        self.replies: Counter[str] = Counter()
        """How many replies were sampled, and how many the journal had, as `journal/…` names them."""
        self._history = history
        self._kept: set[str] = set()
        self._members: dict[str, list[int]] = {}
        """The indices of the requests of each record, by its key."""
        first, prompt = requests[0], requests[0].prompt
        content = digest_rows([prompt.row], prompt.token_ids, prompt.text, prompt.answer, prompt.messages)
        sampling, more = tuple(vars(first.sampling).values()), [route.decides] if route.decides else []

        def key_of(numbers: list[int]) -> str:
            return journal.key(step, first.group, sampling, content, numbers, *more, history=history)

        numbers = [request.number for request in requests]
        key = key_of([])
        self._keys = [key_of_episode(key, number) for number in numbers]
        if journal.is_on and is_whole:
            self._members = {key_of(numbers): list(range(len(requests)))}
        elif journal.is_on:
            self._members = {key: [index] for index, key in enumerate(self._keys)}

    @property
    def source(self) -> str:
        """As `Prompt.source` names it."""
        return self.requests[0].prompt.source

    @property
    def missing(self) -> list[int]:
        return [index for index in range(len(self.requests)) if index not in self.found]

    @property
    def episodes(self) -> list[Episode]:
        both = self.found | self.made
        return [both[index] for index in range(len(self.requests))]

    async def find(self) -> None:
        """Take the episodes that the journal has."""
        if self._members:
            self._take(self.journal.replay.find(self.step, list(self._members)))

    def _take(self, found: Mapping[str, Sequence[Episode]]) -> None:
        self._kept |= found.keys()
        for key, episodes in found.items():
            self.found |= zip(self._members[key], episodes, strict=True)

    def keep(self, episodes: Mapping[int, Episode]) -> None:
        """Take episodes with their rewards, and record them. Records with a failure wait for `accept`."""
        self.made |= episodes
        self._add(with_failures=False)

    def accept(self) -> None:
        """Record the rest: it is known that not too many episodes have failed."""
        self._add(with_failures=True)

    def _add(self, with_failures: bool) -> None:
        records = {}
        for key, indices in self._members.items():
            episodes = [self.made[index] for index in indices if index in self.made]
            is_complete = key not in self._kept and len(episodes) == len(indices)
            if is_complete and (with_failures or not any(episode.failure for episode in episodes)):
                records[key] = episodes
        if records:
            self._kept |= records.keys()
            self._record(records)

    def _record(self, records: Mapping[str, Sequence[Episode]], turns: Sequence[TurnRecord] = ()) -> None:
        self.journal.add(self.step, records, self._history, None, turns)

    def turns(self, index: int) -> EpisodeTurns:
        """Return the turns of the episode of a request."""
        key = self._keys[index]
        return EpisodeTurns(key, self._take_turns(key), lambda turn: self._record({}, [turn]), self._is_valid)

    def _take_turns(self, key: str) -> Sequence[TurnRecord]:
        return self.journal.replay.take_turns(self.step, key)

    _is_valid: Callable[[TurnRecord], Awaitable[bool]] | None = None


class _Asks:
    """How one episode asks for completions (see `trainer.environments.episode_runner.Asks`)."""

    request: Request  # the one that waits for the others of its batch
    recorded: Completion | None  # what the journal has as its completion
    reply: asyncio.Future[Completion]

    def __init__(self, together: _Together, order: tuple[int, int], turns: EpisodeTurns):
        self._together = together
        self.order = order
        self.turns = turns
        together.asking.add(self)

    async def __call__(self, request: Request, turn: str) -> Completion:
        together, name = self._together, reply_name(turn, request)
        together.count("rollout", 1)
        try:
            recorded = await self.turns.find(name)
            if together.engines.unit == "request":
                completion = recorded or await together.engines.complete(request)
            else:
                self.request, self.recorded = request, recorded
                self.reply = asyncio.get_running_loop().create_future()
                together.waiting.add(self)
                together.begin_batch()
                completion = await self.reply
        finally:
            together.count("rollout", -1)
        if recorded is None:
            self.turns.add_reply(name, completion, together.has_company)
        return completion

    def finish(self) -> None:
        together = self._together
        if self in together.asking:
            together.asking.discard(self)
            together.waiting.discard(self)
            together.begin_batch()
            if not together.asking:
                together.on_asked()


class _Together:
    """Episodes that begin together.

    With engines of `unit = "batch"`, completions are made when all episodes that may ask for one do so: what is in a
    batch never depends on time.

    Args:
        count: notes that completions are waited for, or no longer.
        on_asked: called when no episode will ask for more.
    """

    def __init__(self, engines: EnginePool, count: Callable[[str, int], None], on_asked: Callable[[], None]):
        self.engines = engines
        self.has_company = engines.unit == "batch" and engines.repeats  # others decide the bits of a completion
        self.count = count
        self.on_asked = on_asked
        self.asking: set[_Asks] = set()
        self.waiting: set[_Asks] = set()
        self._batches: set[asyncio.Task[None]] = set()

    def begin_batch(self) -> None:
        """Complete the requests that wait, if all episodes do that may ask for more."""
        if self.waiting and len(self.waiting) == len(self.asking):
            waiting, self.waiting = sorted(self.waiting, key=lambda one: one.order), set()
            self._batches.add(task := asyncio.ensure_future(self._complete(waiting)))
            task.add_done_callback(self._batches.discard)

    async def _complete(self, waiting: Sequence[_Asks]) -> None:
        """Answer a batch. If a reply is missing, and the others decide its last bits, they are generated with it."""
        lacks = any(one.recorded is None for one in waiting)
        batch = [one for one in waiting if one.recorded is None or lacks and self.has_company]
        try:
            completions = await self.engines.complete_together([one.request for one in batch]) if batch else []
        except BaseException as error:
            for one in waiting:
                if not one.reply.done():
                    one.reply.set_exception(error)
            return
        made = dict(zip(batch, completions, strict=True))
        for one in waiting:
            if not one.reply.done():
                one.reply.set_result(one.recorded or made[one])


class Rollouts:
    """Runs groups of episodes and scores them, on the event loop of the engines. A context manager.

    Args:
        stop_tokens: end a completion.
        routes: how episodes are run and rewarded, by the sources of their prompts.
        journal: has the episodes that were run before a kill, and gets the others.
    """

    def __init__(
        self,
        cfg: Config,
        engines: EnginePool,
        stop_tokens: tuple[int, ...],
        routes: Mapping[str, Route],
        journal: Journal,
    ):
        self.cfg = cfg
        self.journal = journal
        self.engines = engines
        self.loop = engines.loop
        self._stop_tokens = stop_tokens
        self.routes = routes
        self._counts: Counter[str] = Counter()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            runners = {id(route.episodes): route.episodes for route in self.routes.values()}
            scorers = {id(route.scorer): route.scorer for route in self.routes.values() if route.scorer is not None}
            for process in (*runners.values(), *scorers.values()):
                stack.enter_context(process)
            self._processes = stack.pop_all()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._processes.close()

    def evaluate(self, requests: Sequence[RolloutRequest], purpose: str) -> list[Episode]:
        """Return episodes with their rewards under the weights of now, on the main thread (see `run`)."""
        groups = self.loop.run(self.run(requests, purpose, self.journal.history))
        return [episode for group in groups for episode in group.episodes]

    async def run(
        self,
        requests: Sequence[RolloutRequest],
        purpose: str,
        history: str,
        on_asked: Callable[[], None] = lambda: None,
    ) -> list[Group]:
        """Return groups with their rewards: episodes that the journal has, and those that are run now.

        Args:
            requests: those of one group together.
            purpose: names what the episodes are for, in messages.
            history: of the weights that sample them, which are of one version.
            on_asked: called when the engines have no more to do for these episodes.

        Raises:
            UserError: too many have failed.
        """
        groups = []
        for _, members in itertools.groupby(requests, lambda request: request.group):
            some = list(members)
            route = self.routes[some[0].prompt.source]
            groups.append(Group(self.journal, some, route, history, route.wants_groups, some[0].step))
        await self.run_groups(groups, purpose, on_asked)
        self.judge(groups, purpose)
        self.journal.flush()  # while the ranks score the episodes
        return groups

    async def run_groups(
        self, groups: Sequence[Group], purpose: str, on_asked: Callable[[], None] = lambda: None
    ) -> None:
        """Take what the journal has of groups; run and score their other episodes. The caller gives them to `judge`."""
        together = _Together(self.engines, self._count, on_asked)
        await all_of([group.find() for group in groups])
        is_partial = any(group.missing for group in groups) and any(group.found for group in groups)
        needs_batch = is_partial and together.has_company
        for order, group in enumerate(groups):
            group.order = order
            for index in range(len(group.requests)) if needs_batch else group.missing:
                group.asks[index] = _Asks(together, (order, index), group.turns(index))
        running = [group for group in groups if group.asks]
        async with contextlib.AsyncExitStack() as block:
            runners: dict[EpisodeRunner, Any] = {}
            scorings: dict[str, Scoring] = {}
            for group in running:
                runner, source = group.route.episodes, group.source
                if runner not in runners:
                    runners[runner] = await block.enter_async_context(runner.together())
                if group.route.scorer is not None and group.missing and source not in scorings:
                    count = sum(bool(one.missing) and one.source == source for one in running)
                    scoring = group.route.scorer.open(of_source(purpose, [source]), count, self._on_ranks)
                    scorings[source] = await block.enter_async_context(scoring)
            await all_of(
                [self._run_group(group, runners[group.route.episodes], scorings.get(group.source)) for group in running]
            )
        if not running:
            on_asked()
        self._count_replies(groups)

    def _count_replies(self, groups: Sequence[Group]) -> None:
        """Count the replies of each group, and log the recorded ones that were dropped."""
        others: list[tuple[Group, int, EpisodeTurns]] = []
        for group in groups:
            group.replies["recorded"] += sum(episode.turns for episode in group.found.values())
            for index, turns in ((index, asks.turns) for index, asks in group.asks.items()):
                turns.end()
                group.replies["sampled"] += turns.sampled
                if index not in group.found:
                    group.replies["recorded"] += turns.recorded
                    self.journal.replay.note_replies(turns.recorded)
                    others += [(group, index, turns)] if turns.dropped else []
            group.asks = {}
        if others:
            group, index, first = others[0]
            LOG.warning(
                "rollout.journal: %d recorded replies are dropped: %d episodes took another course than before the "
                "kill (the first: %s of %s, in turn %s), and were sampled on from there",
                sum(turns.dropped for _, _, turns in others),
                len(others),
                group.requests[index].uid,
                group.route.cfg.environment.name or "the policy",
                first.diverged,
            )

    async def _run_group(self, group: Group, runner_block: Any, scoring: Scoring | None) -> None:
        """Run the episodes of a group, and score and record those that the journal did not have.

        Episodes that may be scored one by one are, where the others of their group take longer.
        """
        tasks = {
            asyncio.ensure_future(self._run_episode(group, index, asks, runner_block)): index
            for index, asks in group.asks.items()
        }
        left, wait_s = set(tasks), None if group.route.wants_groups else time_limits.JOURNAL_FLUSH_S
        try:
            while left:
                done, left = await asyncio.wait(left, timeout=wait_s, return_when=asyncio.FIRST_EXCEPTION)
                ended = {tasks[task]: task.result() for task in done}
                if new := {index: ended[index] for index in sorted(ended) if index not in group.found}:
                    group.keep(await self._scored(group, new, scoring))
        finally:
            for task in left:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # else asyncio logs each failure that nobody asked for

    async def _run_episode(self, group: Group, index: int, asks: _Asks, runner_block: Any) -> Episode:
        self._count("environment", 1)
        try:
            return await group.route.episodes.run(group.requests[index], asks, runner_block)
        finally:
            asks.finish()
            self._count("environment", -1)

    async def _scored(
        self, group: Group, episodes: Mapping[int, Episode], scoring: Scoring | None
    ) -> dict[int, Episode]:
        """Return episodes with their rewards. Without a scorer, the environment has given them, or they are 0.

        An environment that may have failed through what the policy did has given a reward of 0, and is not left out:
        else the policy could learn to leave that way.
        """
        results: Iterable[tuple[float, Mapping[str, float], str]]
        if scoring is None:
            results = [(one.reward or 0.0, dict(one.rewards), one.failure) for one in episodes.values()]
        else:
            inputs = []
            for index, one in episodes.items():
                prompt = group.requests[index].prompt
                about = prompt.answer, prompt.text, one.messages, prompt.row, one.status, one
                inputs.append(RewardInput(one.text, *about))
            self._count("reward", 1)
            try:
                results = (await scoring.score(group.order, inputs)).each()
            finally:
                self._count("reward", -1)
        scored = {}
        for (index, one), (reward, terms, reason) in zip(episodes.items(), results, strict=True):
            is_left_out = reason and group.route.cfg.on_failure == "leave_out" and one.reward is None
            own = None if is_left_out else reward
            scored[index] = dataclasses.replace(one, reward=own, rewards=terms, failure=reason, source=group.source)
        return scored

    async def _on_ranks(self, function: Callable[[], Any]) -> Any:
        """Call a function that computes on the ranks; engines that share their GPUs sleep meanwhile."""

        def call() -> Any:
            self.engines.rest()
            return function()

        return await self.loop.on_main(call)

    def _count(self, phase: str, change: int) -> None:
        """Note how many coroutines are in a phase; tell the main thread, which waits, the one that counts."""
        self._counts[phase] += change
        phases = ("rollout", "environment", "reward")
        self.loop.set_phase(next((phase for phase in phases if self._counts[phase]), "rollout"))

    def judge(self, groups: Sequence[Group], purpose: str) -> None:
        """Log the failures of groups that a step uses, and record these.

        Failures are a share of the whole batch, not of a source, of which the batch may hold two episodes. Sources with
        an environment and those with a reward are judged apart, as are sources with limits of their own. A source with
        several rows whose episodes have all failed is not hidden by the others.

        Raises:
            UserError: more than `max_error_rate` of the episodes have failed, or all of a source.
        """
        by_limit: dict[tuple[str, float], dict[str, list[Group]]] = {}
        for group in groups:
            cfg = group.route.cfg
            if cfg.environment.name or group.route.scorer is not None:
                section = "environment" if cfg.environment.name else "reward"
                limit = section, getattr(cfg, section).max_error_rate
                by_limit.setdefault(limit, {}).setdefault(group.source, []).append(group)
        for (section, most), sources in by_limit.items():
            _refuse_above(section, most, sources, purpose)
            for source, some in sources.items():
                cfg, of = some[0].route.cfg, of_source(purpose, [source])
                failed, total = _failures_of(some), _size_of(some)
                if len(failed) == total >= _FEWEST_ROWS * cfg.rollout.n:
                    _refuse_above(section, most, {source: some}, of)
                if failed:
                    outcome = _OUTCOMES[section, cfg.on_failure]
                    LOG.warning(
                        "%s failed and %s; the first: %s", _share(section, len(failed), total, of), outcome, failed[0]
                    )
        for group in groups:
            group.accept()

    def sampling(self, temperature: float, top_p: float, top_k: int) -> Sampling:
        return Sampling(temperature, top_p, top_k, self.cfg.rollout.max_response_tokens, self._stop_tokens)

    def greedy(self) -> Sampling:
        return self.sampling(0.0, 1.0, -1)


def _refuse_above(section: str, most: float, sources: Mapping[str, Sequence[Group]], purpose: str) -> None:
    """Raise a `UserError` if more than a share `most` of the episodes have failed."""
    failures = {source: _failures_of(groups) for source, groups in sources.items()}
    count, total = sum(map(len, failures.values())), sum(map(_size_of, sources.values()))
    if count <= most * total:
        return
    worst = max(failures, key=lambda source: len(failures[source]))
    name = name_in_mix(worst)
    mostly = f", {len(failures[worst])} of them for {name}" if name else ""
    raise UserError(
        f"{section}.max_error_rate={most:g}: {_share(section, count, total, purpose)} failed{mostly} (the first: "
        f"{failures[worst][0]}); nothing was trained on them, and once the {section} works, {CONTINUES}"
    )


def _failures_of(groups: Sequence[Group]) -> list[str]:
    """Return why episodes have failed, those that the journal had left out."""
    return [episode.failure for group in groups for episode in group.made.values() if episode.failure]


def _size_of(groups: Sequence[Group]) -> int:
    return sum(len(group.requests) for group in groups)


def _share(section: str, count: int, total: int, purpose: str) -> str:
    kind = "episodes" if section == "environment" else "rewards"
    return f"{count} of {total} {kind} of {purpose or 'a step'} ({count / total:.1%})"
