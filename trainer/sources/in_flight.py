"""Groups that are sampled all the time, by whichever weights the engines have: not to the last bit, but exactly once.

Rows are admitted in the order of the ledger, at most `rollout.max_staleness` steps ahead, and steps train on them in
this order (see `Flight`). The ledger records a row when its step is committed. So a kill costs no row, and no row is
trained twice: those that were under way are drawn again.

Finished groups are in the journal. Such a group may have been sampled by several versions of the weights, so its record
names one version that none of its tokens is newer than, and the history of that version. After a kill the record is
valid as soon as the run has come to that version with the same history: then all weights that sampled the group are
weights of this run. The run may have to train some steps again before. If it comes to other weights on the way, the
group is sampled anew.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from trainer.checkpoint.components import Component, json_component
from trainer.config import Config
from trainer.data.datasets import PromptSet
from trainer.data.ledger import SampleIndex
from trainer.environments.episode_runner import RolloutRequest
from trainer.episodes import Episode
from trainer.generation.engine import RunningRequests
from trainer.generation.event_loop import Changes
from trainer.journal.turns import TurnRecord
from trainer.metrics.timing import Timer
from trainer.process.failpoints import failpoint
from trainer.sources.episode_metrics import mean_versions
from trainer.sources.rollouts import Group, Rollouts
from trainer.sources.sampling import RowGroup, SamplingSource, StepInFlight

_IN_FLIGHT = "in flight"
"""Stands in keys of records for the history that a group in flight does not have."""


class GroupState(Enum):
    """The state of one group."""

    RUNNING = "running"  # its episodes are sampled, or it waits for the weights of a record
    FINISHED = "finished"  # all of it is there
    TAKEN = "taken"  # a step uses it up: the step trains on it, or has filtered it out


class _FlyingGroup:
    """A row that is admitted and not committed: its episodes are sampled, or the journal has them.

    Args:
        last_step: the last step that can train on it.
        version: of the weights when it was admitted.
    """

    def __init__(self, row: SampleIndex, last_step: int, version: int):
        self.row = row
        self.last_step = last_step
        self.version = version
        self.state = GroupState.RUNNING
        self.is_needed = False  # the next step needs it: it waits for no later weights
        self.groups: list[Group] = []  # its episodes, and its baseline
        self.sampled_by: list[int] = []  # the versions that its records name
        self.began_at = time.monotonic()
        self.ended_at: float | None = None
        self.task: asyncio.Task[RowGroup]

    def move(self, before: GroupState, after: GroupState) -> None:
        assert self.state is before, f"group {self.row} is {self.state.value}, not to be {after.value}"
        self.state = after


class Flight:
    """The groups that are admitted and not committed.

    A group:

        RUNNING --finished--> FINISHED --taken--> TAKEN --trained--> (forgotten)
        TAKEN --given back--> FINISHED

    Steps take groups in the order in which their rows were drawn, and only FINISHED ones: no group is taken twice
    before it is given back, none is trained that was not taken, and none passes another that is still RUNNING.

    A group is charged from its admission until the weights of the step that has trained on it are published. At most
    `(max_staleness + 1) * batch` groups are charged at a time. So one that is admitted while step t is the next one is
    trained in step `t + max_staleness` at the latest.

    Args:
        batch: groups of a step.
        max_staleness: `rollout.max_staleness`.
    """

    def __init__(self, batch: int, max_staleness: int):
        self._batch = batch
        self._most = (max_staleness + 1) * batch
        self.groups: list[_FlyingGroup] = []
        """In the order of their rows. A new one is added at the end."""
        self._charged: list[_FlyingGroup] = []  # those that are taken, and whose weights are not published

    @property
    def untaken(self) -> list[_FlyingGroup]:
        return [group for group in self.groups if group.state is not GroupState.TAKEN]

    def capacity(self) -> int:
        """Return how many groups can be admitted now. Those that a step has filtered out are not charged."""
        return max(0, self._most - len(self.untaken) - min(len(self._charged), self._batch))

    def take(self, count: int) -> list[_FlyingGroup] | None:
        """Take the next `count` groups. None: they are not there, or not finished."""
        chosen = self.untaken[:count]
        if len(chosen) < count or any(group.state is not GroupState.FINISHED for group in chosen):
            return None
        for group in chosen:
            group.move(GroupState.FINISHED, GroupState.TAKEN)
        self._charged += chosen
        return chosen

    def give_back(self, groups: Sequence[_FlyingGroup]) -> None:
        """The step does not need these groups: another one takes them."""
        for group in groups:
            group.move(GroupState.TAKEN, GroupState.FINISHED)
        self._charged = [group for group in self._charged if group not in groups]

    def publish(self) -> None:
        """The weights of the step that has taken groups are published."""
        self._charged.clear()

    def forget(self, groups: Sequence[_FlyingGroup]) -> None:
        """The step that has taken these groups is committed."""
        for group in groups:
            assert group.state is GroupState.TAKEN, f"group {group.row} was not taken"
            self.groups.remove(group)


class WeightHistories:
    """The histories of the weights of this run, by version. Thread-safe: each change makes a new dictionary."""

    def __init__(self) -> None:
        self._histories: dict[int, str] = {}

    def add(self, version: int, history: str) -> None:
        """Add the next version, or the first one of a start.

        If a checkpoint has another history for it, there was a rollback (see `history_at`): no earlier record counts.
        """
        is_same = self._histories.get(version, history) == history
        earlier = {v: h for v, h in self._histories.items() if v < version and is_same}
        self._histories = earlier | {version: history}

    @property
    def newest(self) -> tuple[int, str]:
        """The newest version, and its history."""
        return max(self._histories.items())

    def includes(self, version: int, history: str) -> bool:
        return self._histories.get(version) == history

    def state_dict(self) -> dict[str, Any]:
        return {"histories": {str(version): history for version, history in self._histories.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._histories = {int(version): history for version, history in state["histories"].items()}

    def forget_before(self, version: int) -> None:
        self._histories = {v: h for v, h in self._histories.items() if v >= version}


class _GroupInFlight(Group):
    """Episodes of a row in flight. The key of their record has neither a step nor a history: a kill does not change it.

    Args:
        flying: the row.
    """

    def __init__(self, source: InFlightSource, flying: _FlyingGroup, requests: Sequence[RolloutRequest]):
        self._source = source
        self._flying = flying
        rollouts = source.rollouts
        route = rollouts.routes[requests[0].prompt.source]
        super().__init__(rollouts.journal, requests, route, _IN_FLIGHT, is_whole=True, step=0)

    async def find(self) -> None:
        """Take the episodes of the newest valid record. Waits for the version of one that may become valid."""
        replay, histories = self.journal.replay, self._source.histories
        for key in self._members:
            candidates = replay.candidates(key)
            while True:
                newest = histories.newest
                for version, history in candidates:
                    if histories.includes(version, history) and (found := replay.take(key, version, history)):
                        self._flying.sampled_by.append(version)
                        return self._take({key: found})
                if self._flying.is_needed or all(version <= newest[0] for version, _ in candidates):
                    break
                await self._source.changes.until(
                    lambda newest=newest: histories.newest != newest or self._flying.is_needed
                )
            replay.miss()

    def _record(self, records: Mapping[str, Sequence[Episode]], turns: Sequence[TurnRecord] = ()) -> None:
        version, history = self._source.histories.newest  # the engines never have newer weights than that
        self._flying.sampled_by.append(version)
        self.journal.add(self._flying.last_step, records, history, version, turns)

    def _take_turns(self, key: str) -> Sequence[TurnRecord]:
        turns = self.journal.replay.take_turns(None, key)
        self._flying.sampled_by += {turn.sampled_by[0] for turn in turns if turn.sampled_by is not None}
        return turns

    async def _is_valid(self, turn: TurnRecord) -> bool:
        if turn.sampled_by is None:
            return False
        histories = self._source.histories
        await self._source.changes.until(lambda: histories.newest[0] >= turn.sampled_by[0] or self._flying.is_needed)
        return histories.includes(*turn.sampled_by)


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """Return the length of the union of spans (begin, end); one that ends before its begin is empty."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


class InFlightSource(SamplingSource):
    """Samples groups without end, while the weights change (`rollout.in_flight_updates`)."""

    running: RunningRequests = "keep"
    _waits_for_generation = False

    def __init__(self, cfg: Config, rollouts: Rollouts, train: PromptSet, timer: Timer, needs_baselines: bool = False):
        super().__init__(cfg, rollouts, train, timer, needs_baselines)
        self.histories = WeightHistories()
        self.changes = Changes()
        """Notified when there are new weights, or groups are needed, or have ended."""
        self._flight = self._new_flight()
        self._used: list[_FlyingGroup] = []  # the groups that the step uses up
        self._published_at = time.monotonic()

    def _new_flight(self) -> Flight:
        return Flight(self.cfg.trainer.train_batch_size, self.cfg.rollout.max_staleness)

    @property
    def repeats(self) -> bool:
        return False

    def start(self, version: int, is_initial: bool) -> None:
        self.histories.add(version, self.rollouts.journal.history)
        super().start(version, is_initial)
        self.running = "keep"
        self._published_at = time.monotonic()

    def publish(self, version: int) -> None:
        """Give the engines the policy's new weights now; requests that are under way continue with these."""
        self.histories.add(version, self.rollouts.journal.history)  # before the first token of these weights
        super().publish(version)
        self.running = "keep"
        self._loop.call(self._note_published)
        failpoint("in_flight:published")

    def _note_published(self) -> None:
        self._flight.publish()
        self.changes.notify()
        # How long engines had something to generate since the last weights, and how long they had not.
        since, now = self._published_at, time.monotonic()
        self._published_at = now
        spans = [(max(one.began_at, since), one.ended_at or now) for one in self._flight.groups]
        busy = covered(spans)
        self._speeds["time/generation"] = busy
        if self._admissible(len(self._flight.groups) - len(self._used)):  # else engines wait for nothing
            self._speeds["time/wait_weights"] = now - since - busy

    def _commit(self, step: int) -> None:
        self._flight.forget(self._used)
        self._used = []
        # Also the histories of groups that a dead run has recorded, and that are not admitted again yet.
        versions = [self._version - self.cfg.rollout.max_staleness]
        versions += [version for one in self._flight.groups for version in (one.version, *one.sampled_by)]
        if (recorded := self.rollouts.journal.replay.oldest_version()) is not None:
            versions.append(recorded)
        self.histories.forget_before(min(versions))
        super()._commit(step)

    def _admissible(self, known: int) -> int:
        """Return how many rows can be admitted now. After the last step it is none, however many were filtered out.

        Args:
            known: groups that are admitted, and that steps from now on train on.
        """
        if self._version > self.cfg.total_steps:
            return 0
        count = self._flight.capacity()
        if self.cfg.algorithm.dynamic_sampling:  # how many it will filter out is not known
            return count
        left = (self.cfg.total_steps - self._version + 1) * self.cfg.trainer.train_batch_size
        return max(0, min(count, left - known))

    def _admit(self) -> None:
        """Begin the next groups."""
        groups = self._flight.groups
        count = self._admissible(len(groups))
        last_step = self._version + self.cfg.rollout.max_staleness
        for row in self.ledger.peek(count, in_flight=[flying.row for flying in groups]):
            groups.append(flying := _FlyingGroup(row, last_step, self._version))
            flying.task = asyncio.ensure_future(self._fly(flying))
            flying.task.add_done_callback(lambda task: task.cancelled() or task.exception())  # `_more_groups` raises it

    async def _fly(self, flying: _FlyingGroup) -> RowGroup:
        """Sample one group, with its baseline."""

        async def sample(numbers: Sequence[int], greedy: bool) -> list[Episode]:
            sampling = self.rollouts.greedy() if greedy else self._sampling
            requests = self._requests([flying.row], flying.version, numbers, sampling)
            group = _GroupInFlight(self, flying, requests)
            await self.rollouts.run_groups([group], f"step {flying.last_step}")
            flying.groups.append(group)
            return group.episodes

        try:
            if self.ledger.row(flying.row).recorded:
                groups = [self._recorded(flying.row)]
            else:
                groups = [RowGroup(flying.row, await sample(range(self.cfg.rollout.n), greedy=False))]
            if self._needs_baselines:
                groups = self._baselined(groups, await sample([-1], greedy=True))
            failpoint("in_flight:finished")
            flying.move(GroupState.RUNNING, GroupState.FINISHED)
            return groups[0]
        finally:
            flying.ended_at = time.monotonic()
            self.changes.notify()

    def next(self, step: int) -> list[Episode]:
        """Return the episodes of a step: the oldest groups."""
        self.rollouts.journal.replay.note_generated(step)
        return super().next(step)

    async def _make_batch(self, step: StepInFlight) -> Any:
        self._used = []
        batch = await super()._make_batch(step)
        self._flight.give_back(self._used[len(batch.used) :])
        del self._used[len(batch.used) :]
        return dataclasses.replace(batch, metrics=batch.metrics | mean_versions(batch.episodes))

    async def _more_groups(self, groups: Sequence[RowGroup], step: StepInFlight) -> list[RowGroup]:
        """Wait for the next groups to train on."""
        self._admit()  # groups that the step has filtered out make room
        wanted = self.cfg.trainer.train_batch_size
        while (taken := self._flight.take(wanted)) is None:
            next_ones = self._flight.untaken[:wanted]
            for flying in next_ones:
                flying.is_needed = True
            self.changes.notify()
            for flying in next_ones:
                if flying.task.done():
                    flying.task.result()  # raises what has ended it
            if running := [flying.task for flying in next_ones if not flying.task.done()]:
                await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        self._used += taken
        failpoint("in_flight:taken")
        for flying in taken:
            for group in flying.groups:
                step.replies.update(group.replies)
        for number, purpose in enumerate((f"step {step.step}", f"the baselines of step {step.step}")):
            if asked := [flying.groups[number] for flying in taken if number < len(flying.groups)]:
                self.rollouts.judge(asked, purpose)
        return [flying.task.result() for flying in taken]

    async def _with_baselines(self, groups: Sequence[RowGroup], step: StepInFlight) -> list[RowGroup]:
        return list(groups)  # they have them

    def components(self) -> list[Component]:
        """Return the component with the histories of the weights, by which groups in the journal are valid.

        The component of the steps ahead is empty. It warns of rollouts that a run with `rollout.ahead` has saved.
        """
        shape: dict[Any, Any] = {"histories": {str: str}}
        component = json_component(
            "in_flight", self.histories.state_dict, self.histories.load_state_dict, shape, kinds=("data",)
        )
        ahead = [dataclasses.replace(of_ahead, if_missing="") for of_ahead in super().components()]
        return [*ahead, dataclasses.replace(component, if_missing="was not sampled in flight")]

    def _cancel(self, *more: asyncio.Task[Any]) -> None:
        super()._cancel(*more, *(flying.task for flying in self._flight.groups))
        self._flight, self._used = self._new_flight(), []
        self.running = "abort"  # nobody waits for what the engines still generate
