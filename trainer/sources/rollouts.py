"""The road of a rollout: one coroutine a group looks into the journal, runs what is missing, scores and records it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from trainer.config import Config
from trainer.data.datasets import name_in_mix, of_source
from trainer.data.records import key_of_episode
from trainer.data.row_files import digest_rows
from trainer.environments.episode_runner import EpisodeRunner, RolloutRequest
from trainer.episodes import Episode
from trainer.errors import UserError
from trainer.generation.engine import Completion, Request, Sampling
from trainer.generation.engine_pool import EnginePool
from trainer.generation.event_loop import EventLoop, all_of
from trainer.journal.journal import Journal
from trainer.journal.turns import TurnRecord
from trainer.process import time_limits
from trainer.process.signals import CONTINUES
from trainer.rewards.scorer import Scoring
from trainer.rewards.terms import RewardInput
from trainer.sources.routes import Route
from trainer.sources.turns import EpisodeTurns, reply_name

LOG = logging.getLogger(__name__)

_FEWEST_ROWS = 4
"""Of a source, whose failures say that the source is broken and not a row."""
_OUTCOMES = {
    ("reward", "leave_out"): "are left out",
    ("reward", "zero"): "count as 0",
    ("environment", "leave_out"): "have a reward of 0, or are left out if the policy had not replied",
    ("environment", "zero"): "count as 0",
}
"""What becomes of failures, by the section of the config that gives the rewards, and its `on_failure`."""


class GroupRecord:
    """What the journal has of a group, and what it gets: one record for each episode, or for all if `is_whole`.

    Args:
        history: of the weights that sample the group.
        decides: digests of what decides the episodes besides the settings of the run.
    """

    def __init__(
        self,
        journal: Journal,
        requests: Sequence[RolloutRequest],
        history: str,
        is_whole: bool,
        decides: Sequence[str] = (),
    ):
        self.journal = journal
        self.step = requests[0].step
        self._history = history
        self._episodes: dict[int, Episode] = {}
        self._kept: set[str] = set()
        self._members: dict[str, list[int]] = {}
        """The indices of the requests of each record, by its key."""
        numbers = [request.number for request in requests]
        content = content_of(requests[0])
        key = journal.key(self.step, *content, [], *decides, history=history)
        self._keys = [key_of_episode(key, number) for number in numbers]
        if journal.is_on and is_whole:
            key = journal.key(self.step, *content, numbers, *decides, history=history)
            self._members = {key: list(range(len(requests)))}
        elif journal.is_on:
            self._members = {key: [index] for index, key in enumerate(self._keys)}

    async def find(self) -> dict[int, Episode]:
        """Return the episodes that the journal has, by the indices of their requests."""
        if not self._members:
            return {}
        return self._take(self.journal.replay.find(self.step, list(self._members)))

    def _take(self, found: Mapping[str, Sequence[Episode]]) -> dict[int, Episode]:
        self._kept |= found.keys()
        return {i: one for key, some in found.items() for i, one in zip(self._members[key], some, strict=True)}

    def keep(self, episodes: Mapping[int, Episode]) -> None:
        """Record episodes with their rewards. Records with a failure wait for `accept`."""
        self._episodes |= episodes
        self._add(lambda episode: not episode.failure)

    def accept(self) -> None:
        """Record the rest: it is known that not too many episodes have failed."""
        self._add(lambda episode: True)

    def _add(self, may_be_kept: Callable[[Episode], bool]) -> None:
        records = {
            key: [self._episodes[index] for index in indices]
            for key, indices in self._members.items()
            if key not in self._kept
            and all(index in self._episodes and may_be_kept(self._episodes[index]) for index in indices)
        }
        if records:
            self._kept |= records.keys()
            self._record(records)

    def _record(self, records: Mapping[str, Sequence[Episode]]) -> None:
        self.journal.add(self.step, records, self._history)

    def turns(self, index: int) -> EpisodeTurns:
        """Return the turns of the episode of a request."""
        key = self._keys[index]
        return EpisodeTurns(key, self._take_turns(key), self._record_turn, self._is_valid)

    def _take_turns(self, key: str) -> Sequence[TurnRecord]:
        return self.journal.replay.take_turns(self.step, key)

    def _record_turn(self, turn: TurnRecord) -> None:
        self.journal.add(self.step, {}, self._history, None, [turn])

    _is_valid: Callable[[TurnRecord], Awaitable[bool]] | None = None


def content_of(first: RolloutRequest) -> tuple[Any, ...]:
    """Return what decides the episodes of a group besides their numbers, the step, the weights and the config."""
    prompt = first.prompt
    content = digest_rows([prompt.row], prompt.token_ids, prompt.text, prompt.answer, prompt.messages)
    return first.group, tuple(vars(first.sampling).values()), content


@dataclass
class Group:
    """The episodes of one prompt that are asked for together, with their rewards once they are finished."""

    order: int
    """Among those that begin together."""
    requests: Sequence[RolloutRequest]
    record: GroupRecord
    route: Route
    found: dict[int, Episode] = field(default_factory=dict)
    """Those that the journal had, by the indices of their requests."""
    made: dict[int, Episode] = field(default_factory=dict)
    """Those that were run."""
    replies: Counter[str] = field(default_factory=Counter)
    """How many replies were sampled, and how many the journal had, as `journal/…` names them."""

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


class _Asks:
    """How one episode asks for completions (see `trainer.environments.episode_runner.Asks`)."""

    def __init__(self, together: _Together, order: tuple[int, int], turns: EpisodeTurns):
        self._together = together
        self.order = order
        self.turns = turns

    async def __call__(self, request: Request, turn: str) -> Completion:
        return await self._together.complete(self, request, turn)

    def finish(self) -> None:
        self._together.finish(self)


@dataclass(eq=False)
class _Waiting:
    """A request that waits for the others of its batch."""

    request: Request
    future: asyncio.Future[Completion]
    recorded: Completion | None
    """What the journal has as its completion."""


class _Together:
    """Groups that begin together.

    With engines of `unit = "batch"`, completions are made when all episodes that may ask for one do so: what is in a
    batch never depends on time.

    Args:
        count: notes that completions are waited for, or no longer.
        on_asked: called when no episode will ask for more.
    """

    def __init__(self, engines: EnginePool, count: Callable[[str, int], None], on_asked: Callable[[], None]):
        self.engines = engines
        self.has_company = engines.unit == "batch" and engines.repeats  # others decide the bits of a completion
        self._count = count
        self._on_asked = on_asked
        self._asking: set[_Asks] = set()
        self._waiting: dict[_Asks, _Waiting] = {}
        self._batches: set[asyncio.Task[None]] = set()

    def begin(self, order: tuple[int, int], turns: EpisodeTurns) -> _Asks:
        asks = _Asks(self, order, turns)
        self._asking.add(asks)
        return asks

    async def complete(self, asks: _Asks, request: Request, turn: str) -> Completion:
        name = reply_name(turn, request)
        self._count("rollout", 1)
        try:
            recorded = await asks.turns.find(name)
            if self.engines.unit == "request":
                completion = recorded or await self.engines.complete(request)
            else:
                waiting = _Waiting(request, asyncio.get_running_loop().create_future(), recorded)
                self._waiting[asks] = waiting
                self._begin_batch()
                completion = await waiting.future
        finally:
            self._count("rollout", -1)
        if recorded is None:
            asks.turns.add_reply(name, completion, self.has_company)
        return completion

    def finish(self, asks: _Asks) -> None:
        if asks not in self._asking:
            return
        self._asking.discard(asks)
        self._waiting.pop(asks, None)
        self._begin_batch()
        if not self._asking:
            self._on_asked()

    def _begin_batch(self) -> None:
        if self._waiting and len(self._waiting) == len(self._asking):
            waiting, self._waiting = sorted(self._waiting.items(), key=lambda item: item[0].order), {}
            self._batches.add(task := asyncio.ensure_future(self._complete([item for _, item in waiting])))
            task.add_done_callback(self._batches.discard)

    async def _complete(self, waiting: Sequence[_Waiting]) -> None:
        """Answer a batch. If a reply is missing, and the others decide its last bits, they are generated with it."""
        lacks = any(one.recorded is None for one in waiting)
        batch = [one for one in waiting if one.recorded is None or lacks and self.has_company]
        try:
            completions = await self.engines.complete_together([one.request for one in batch]) if batch else []
        except BaseException as error:
            for one in waiting:
                if not one.future.done():
                    one.future.set_exception(error)
            return
        made = {id(one): completion for one, completion in zip(batch, completions, strict=True)}
        for one in waiting:
            if not one.future.done():
                one.future.set_result(one.recorded or made[id(one)])


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
        self._stop_tokens = stop_tokens
        self.routes = routes
        self._counts: Counter[str] = Counter()

    @property
    def loop(self) -> EventLoop:
        return self.engines.loop

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
        return self.loop.run(self.run(requests, purpose, self.exact_record(self.journal.history)))

    def exact_record(self, history: str) -> Callable[[Sequence[RolloutRequest]], GroupRecord]:
        """Return what makes the records of groups that one version of the weights samples (see `GroupRecord`)."""

        def record(some: Sequence[RolloutRequest]) -> GroupRecord:
            route = self.routes[some[0].prompt.source]
            return GroupRecord(
                self.journal, some, history, route.wants_groups, [route.decides] if route.decides else []
            )

        return record

    async def run(
        self,
        requests: Sequence[RolloutRequest],
        purpose: str,
        record: Callable[[Sequence[RolloutRequest]], GroupRecord],
        on_asked: Callable[[], None] = lambda: None,
        replies: Counter[str] | None = None,
    ) -> list[Episode]:
        """Return episodes with their rewards: those that the journal has, and those that are run now.

        Args:
            requests: those of one group together.
            purpose: names what the episodes are for, in messages.
            record: returns the record of a group.
            on_asked: called when the engines have no more to do for these episodes.
            replies: gets what `Group.replies` counts.

        Raises:
            UserError: too many have failed.
        """
        groups = await self.run_groups(requests, purpose, record, on_asked)
        for group in groups if replies is not None else ():
            replies.update(group.replies)
        self.judge(groups, purpose)
        self.journal.flush()  # while the ranks score the episodes
        return [episode for group in groups for episode in group.episodes]

    async def run_groups(
        self,
        requests: Sequence[RolloutRequest],
        purpose: str,
        record: Callable[[Sequence[RolloutRequest]], GroupRecord],
        on_asked: Callable[[], None] = lambda: None,
    ) -> list[Group]:
        """Return the groups of `run`. The caller gives them to `judge`."""
        together = _Together(self.engines, self._count, on_asked)
        groups = []
        for order, (_, members) in enumerate(itertools.groupby(requests, lambda request: request.group)):
            some = list(members)
            groups.append(Group(order, some, record(some), self.routes[some[0].prompt.source]))
        await all_of([self._find(group) for group in groups])
        is_partial = any(group.missing for group in groups) and any(group.found for group in groups)
        needs_batch = is_partial and together.has_company
        todo = {
            group.order: range(len(group.requests)) if needs_batch else group.missing
            for group in groups
            if needs_batch or group.missing
        }
        running = [groups[order] for order in todo]
        asks = {
            (order, index): together.begin((order, index), groups[order].record.turns(index))
            for order, some in todo.items()
            for index in some
        }
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
                [
                    self._run_group(
                        group,
                        {index: asks[group.order, index] for index in todo[group.order]},
                        runners[group.route.episodes],
                        scorings.get(group.source),
                    )
                    for group in running
                ]
            )
        if not asks:
            on_asked()
        self._count_replies(groups, asks)
        return groups

    def _count_replies(self, groups: Sequence[Group], asks: Mapping[tuple[int, int], _Asks]) -> None:
        """Count the replies of each group, and log the recorded ones that were dropped."""
        for group in groups:
            group.replies["recorded"] += sum(episode.turns for episode in group.found.values())
        for (order, index), one in asks.items():
            turns, group = one.turns, groups[order]
            turns.end()
            group.replies["sampled"] += turns.sampled
            if index not in group.found:
                group.replies["recorded"] += turns.recorded
                self.journal.replay.note_replies(turns.recorded)
        others = [
            (groups[order], index, one.turns)
            for (order, index), one in asks.items()
            if one.turns.dropped and index not in groups[order].found
        ]
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

    async def _find(self, group: Group) -> None:
        group.found = await group.record.find()

    async def _run_group(
        self, group: Group, asks: Mapping[int, _Asks], runner_block: Any, scoring: Scoring | None
    ) -> None:
        """Run the episodes of a group, and score and record those that the journal did not have.

        Episodes that may be scored one by one are, where the others of their group take longer.
        """
        missing = set(group.missing)
        tasks = {
            asyncio.ensure_future(self._run_episode(group, index, one, runner_block)): index
            for index, one in asks.items()
        }
        left, wait_s = set(tasks), None if group.route.wants_groups else time_limits.JOURNAL_FLUSH_S
        try:
            while left:
                done, left = await asyncio.wait(left, timeout=wait_s, return_when=asyncio.FIRST_EXCEPTION)
                ended = {tasks[task]: task.result() for task in done}
                new = {index: ended[index] for index in sorted(ended) if index in missing}
                if new:
                    scored = await self._scored(group, new, scoring)
                    group.made |= scored
                    group.record.keep(scored)
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
        """Return episodes with their rewards. Without a scorer, the environment has given them, or they are 0."""
        if scoring is None:
            return {
                index: _with_reward(group, one, one.reward or 0.0, dict(one.rewards), one.failure)
                for index, one in episodes.items()
            }
        inputs = [_reward_input(group.requests[index], one) for index, one in episodes.items()]
        self._count("reward", 1)
        try:
            scores = await scoring.score(group.order, inputs)
        finally:
            self._count("reward", -1)
        return {
            index: _with_reward(group, one, *result)
            for (index, one), result in zip(episodes.items(), scores.each(), strict=True)
        }

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
            if group.route.has_rewards:
                by_limit.setdefault(_error_limit(group.route.cfg), {}).setdefault(group.source, []).append(group)
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
            group.record.accept()

    def sampling(self, temperature: float, top_p: float, top_k: int) -> Sampling:
        return Sampling(temperature, top_p, top_k, self.cfg.rollout.max_response_tokens, self._stop_tokens)

    def greedy(self) -> Sampling:
        return self.sampling(0.0, 1.0, -1)


def _with_reward(group: Group, episode: Episode, reward: float, terms: Mapping[str, float], reason: str) -> Episode:
    """Return an episode with its reward.

    Args:
        reason: why the reward or the environment failed; empty: it did not. An environment that may have failed
            through what the policy did has given a reward of 0: else the policy could learn to leave that way.
    """
    is_left_out = reason and group.route.cfg.on_failure == "leave_out" and episode.reward is None
    return dataclasses.replace(
        episode,
        reward=None if is_left_out else reward,
        rewards=terms,
        failure=reason,
        source=group.source,
    )


def _reward_input(request: RolloutRequest, episode: Episode) -> RewardInput:
    """Return an episode as a scorer gets it."""
    prompt = request.prompt
    return RewardInput(episode.text, prompt.answer, prompt.text, episode.messages, prompt.row, episode.status, episode)


def _error_limit(cfg: Config) -> tuple[str, float]:
    """Return the section, `environment` or `reward`, that gives the rewards, and its `max_error_rate`."""
    if cfg.environment.name:
        return "environment", cfg.environment.max_error_rate
    return "reward", cfg.reward.max_error_rate


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
