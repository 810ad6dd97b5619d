"""Groups that are sampled all the time, by whichever weights the engines have: not to the last bit, but exactly once.

Each group is sampled on a thread of its own, for as long as it takes, while the ranks train. Rows are admitted in the
order of the ledger, at most `rollout.max_staleness` steps ahead (see `Window`). The ledger records a row when its step
is committed. So a kill costs no row, and no row is trained twice: those that were under way are drawn again.

Finished groups are in the journal. Such a group may have been sampled by several versions of the weights, so its record
names one version that none of its tokens is newer than, and the history of that version. After a kill the record is
valid as soon as the run has come to that version with the same history: then all weights that sampled the group are
weights of this run. The run may have to train some steps again before. If it comes to other weights on the way, the
group is sampled anew.

Which groups a step takes depends on which are finished, so the journal has that, too. A step that begins with the same
weights as before a kill takes the same groups again, and so comes to the same weights as before.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainer.checkpoint.components import Component, json_part
from trainer.config import Config
from trainer.data.datasets import PromptSet
from trainer.data.ledger import SampleIndex
from trainer.environments.episode_runner import RolloutRequest
from trainer.episodes import Episode
from trainer.generation.engine import RunningRequests
from trainer.journal.journal import Journal
from trainer.journal.taken import TakenGroup
from trainer.metrics.timing import Timer
from trainer.process import time_limits
from trainer.process.failpoints import failpoint
from trainer.process.signals import SIGNALS
from trainer.sources.ahead import BatchProgress, BatchThread, end_threads
from trainer.sources.batches import StepBatch, UsedRow
from trainer.sources.episode_metrics import mean_versions
from trainer.sources.error_rate import SourceFailures, judge_failures
from trainer.sources.recorded import RecordedEpisodes, content_of
from trainer.sources.rollout_runner import RolloutRunner
from trainer.sources.sampling import Group, SamplingSource
from trainer.sources.window import Window

LOG = logging.getLogger(__name__)

_IN_FLIGHT = "in flight"
"""Stands in keys of records for the history that a group in flight does not have."""


_PURPOSES = ("step {}", "the baselines of step {}")
"""Names what the calls of a group are for, in messages."""


class WeightHistories:
    """The histories of the weights of this run, by version. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._histories: dict[int, str] = {}

    def add(self, version: int, history: str) -> None:
        """Add the next version, or the first one of a start.

        If a checkpoint has another history for it, there was a rollback (see `history_at`): no earlier record counts.
        """
        with self._changed:
            is_same = self._histories.get(version, history) == history
            earlier = {v: h for v, h in self._histories.items() if v < version and is_same}
            self._histories = earlier | {version: history}
            self._changed.notify_all()

    @property
    def newest(self) -> tuple[int, str]:
        """The newest version, and its history."""
        with self._changed:
            version = max(self._histories)
            return version, self._histories[version]

    def includes(self, version: int, history: str) -> bool:
        with self._changed:
            return self._histories.get(version) == history

    def wait(self, version: int) -> bool:
        """Wait a moment until the run has come to a version; return whether it has."""
        with self._changed:
            return self._changed.wait_for(lambda: max(self._histories) >= version, time_limits.POLL_INTERVAL_S)

    def state_dict(self) -> dict[str, Any]:
        with self._changed:
            return {"histories": {str(version): history for version, history in self._histories.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        with self._changed:
            self._histories = {int(version): history for version, history in state["histories"].items()}

    def forget_before(self, version: int) -> None:
        with self._changed:
            self._histories = {v: h for v, h in self._histories.items() if v >= version}


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """Return the length of the union of spans (begin, end); one that ends before its begin is empty."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


class GroupThread(BatchThread):
    """A group that is sampled on a thread, or that the journal has.

    Args:
        row: of the group.
        last_step: the last step that can train on it.
        source: samples it.
    """

    def __init__(self, row: SampleIndex, last_step: int, version: int, source: InFlightSource):
        self.row = row
        self.last_step = last_step
        self.histories = source.histories
        self.calls: list[_RecordedInFlight] = []
        """Its episodes, and its baselines."""
        self.is_needed = False
        """The next step needs it: it waits for no later version."""
        self.is_waiting = False
        """It waits for the version of a record."""
        self._ended = source.ended
        super().__init__(version, version, _IN_FLIGHT, source.make_group, None)

    @property
    def name(self) -> str:
        return f"the group of row {self.row.index} of epoch {self.row.epoch}"

    def _run(self) -> None:
        super()._run()
        with self._ended:
            self._ended.notify_all()

    def records(
        self, journal: Journal, requests: Sequence[RolloutRequest], are_single: Callable[[str], bool]
    ) -> RecordedEpisodes:
        """See `BatchProgress.records`. The group is one record, because a record names one version of the weights."""
        self.calls.append(_RecordedInFlight(journal, requests, self))
        return self.calls[-1]

    @property
    def oldest_version(self) -> int:
        """The oldest version that decides if the records of the group are valid."""
        return min([self.version, *(call.sampled_by[0] for call in list(self.calls) if call.sampled_by is not None)])

    def taken(self) -> TakenGroup:
        """Return the group and its records, as those that a step has taken."""
        records = {call.key: call.sampled_by for call in self.calls if call.sampled_by is not None}
        return TakenGroup(self.row, records)

    def find(self, journal: Journal, key: str) -> tuple[list[Episode], tuple[int, str]] | None:
        """Return a valid record of the group, with its version and history.

        Waits for the version of one that may become valid.
        """
        for version, history in journal.candidates(key):
            while not self.histories.wait(version) and not self.is_needed:
                self.is_waiting = True
                self.check()
            self.is_waiting = False
            if self.histories.includes(version, history) and (found := journal.take(key, version, history)) is not None:
                return found, (version, history)
        return None


class _RecordedInFlight(RecordedEpisodes):
    """The record of one group. Its key has neither a step nor a history: it is the same after a kill.

    A group with failures is recorded by `accept`: once it is known that not too many groups of the step have failed.
    """

    def __init__(self, journal: Journal, requests: Sequence[RolloutRequest], thread: GroupThread):
        self._thread = thread
        self.sampled_by: tuple[int, str] | None = None
        """Version and history of the record. None: there is none yet."""
        self._last_step = 0
        super().__init__(journal, requests, _IN_FLIGHT)
        self.are_failures_judged = False
        self.failures: list[str] = []
        """Why episodes failed that the journal did not have."""
        self._unjudged: dict[int, list[Episode]] = {}

    @property
    def key(self) -> str:
        (key,) = self._keys
        return key

    def _key(self, group: Sequence[RolloutRequest], numbers: Sequence[int]) -> str:
        return self._journal.key(0, *content_of(group, numbers), history=_IN_FLIGHT)

    def _find(self, keys: Sequence[str]) -> dict[str, list[Episode]]:
        found = {}
        for key in keys if self._journal.is_on else ():
            record = self._thread.find(self._journal, key)
            self._journal.note_in_flight(key, record is not None)
            if record is not None:
                found[key], self.sampled_by = record
                self._last_step = self._journal.last_step(key, *self.sampled_by)
        return found

    def keep_longer(self, step: int, last_step: int) -> None:
        """Record a group that the journal had once more if its record is deleted with those of `step`.

        With a larger `rollout.window` than before, groups pass it, and a later step trains on it.
        """
        if self._found and self._last_step <= step:
            assert self.sampled_by is not None
            version, history = self.sampled_by
            self._journal.add(last_step, self._found, history, version)
            self._last_step = last_step

    def accept(self) -> None:
        """Record the groups with failures."""
        if self._journal.is_on:
            super()._add(self._unjudged)

    def _add(self, groups: Mapping[int, list[Episode]]) -> None:
        failed = {number: group for number, group in groups.items() if any(episode.failure for episode in group)}
        self._unjudged |= failed
        super()._add({number: group for number, group in groups.items() if number not in failed})

    def keep_rest(self, episodes: Sequence[Episode]) -> list[Episode]:
        self.failures = [episode.failure for episode in episodes if episode.failure]
        return super().keep_rest(episodes)

    def _flush(self) -> None:
        """Other groups follow soon, and go into the same file."""

    def _record(self, groups: Mapping[str, list[Episode]]) -> None:
        version, history = self._thread.histories.newest  # the engines never have newer weights than that
        if groups:
            self.sampled_by = version, history
        self._journal.add(self._thread.last_step, groups, history, version)


class InFlightSource(SamplingSource):
    """Samples groups without end, while the weights change (`rollout.in_flight_updates`)."""

    running: RunningRequests = "keep"

    def __init__(
        self, cfg: Config, runner: RolloutRunner, train: PromptSet, timer: Timer, needs_baselines: bool = False
    ):
        super().__init__(cfg, runner, train, timer, needs_baselines)
        self.histories = WeightHistories()
        self.ended = threading.Condition()
        """Notified when the thread of a group ends."""
        self._threads: dict[int, GroupThread] = {}
        """The groups that are admitted and not committed, by their numbers."""
        self._window = self._new_window()
        self._trained: list[int] = []
        """The groups that the step uses up."""
        self._published_at = time.monotonic()

    def _new_window(self) -> Window:
        r = self.cfg.rollout
        return Window(self.cfg.trainer.train_batch_size, r.max_staleness, r.window)

    @property
    def repeats(self) -> bool:
        return False

    def start(self, version: int, is_initial: bool) -> None:
        self.histories.add(version, self.runner.journal.history)
        super().start(version, is_initial)
        self.running = "keep"
        self._published_at = time.monotonic()

    def publish(self, version: int) -> None:
        """Give the engines the policy's new weights now; requests that are under way continue with these."""
        self.histories.add(version, self.runner.journal.history)  # before the first token of these weights
        super().publish(version)
        self.running = "keep"
        self._window.publish()
        self._measure_generation()
        failpoint("in_flight:published")

    def commit(self, step: int) -> None:
        for number in self._trained:
            del self._threads[number]
        self._trained = []
        last_step = self._window.last_step(self._version)
        for thread in self._threads.values():
            for call in list(thread.calls):
                call.keep_longer(step, last_step)
        # Those of groups that no step has trained on, also of groups that a dead run has recorded, and that are not
        # admitted again yet: they were admitted when this step could still be their last one.
        versions = [self._version - self._window.last_step(0)]
        versions += [thread.oldest_version for thread in self._threads.values()]
        if (recorded := self.runner.journal.oldest_version()) is not None:  # with a larger limit, perhaps
            versions.append(recorded)
        self.histories.forget_before(min(versions))
        super().commit(step)

    def _measure_generation(self) -> None:
        """Measure how long engines had something to generate since the last weights, and how long they had not."""
        since, now = self._published_at, time.monotonic()
        self._published_at = now
        spans = [(thread.began_at or now, thread.generated_at or now) for thread in self._threads.values()]
        busy = covered([(max(begin, since), end) for begin, end in spans])
        self._speeds["time/generation"] = busy
        if self._admissible(len(self._threads) - len(self._trained)):  # else engines wait for nothing
            self._speeds["time/wait_weights"] = now - since - busy

    def _admissible(self, known: int) -> int:
        """Return how many rows can be admitted now. After the last step it is none, however many were filtered out.

        Args:
            known: groups that are admitted, and that steps from now on train on.
        """
        if self._version > self.cfg.total_steps:
            return 0
        count = self._window.capacity()
        if self.cfg.algorithm.dynamic_sampling:  # how many it will filter out is not known
            return count
        left = (self.cfg.total_steps - self._version + 1) * self.cfg.trainer.train_batch_size
        return max(0, min(count, left - known))

    def _begin_ahead(self) -> None:
        """Admit the next rows."""
        count = self._admissible(len(self._threads))
        rows = self.ledger.peek(count, in_flight=[thread.row for thread in self._threads.values()])
        last_step = self._window.last_step(self._version)
        for number, row in zip(self._window.admit(count), rows, strict=True):
            self._threads[number] = GroupThread(row, last_step, self._version, self)

    def next(self, step: int) -> list[Episode]:
        """Return the episodes of a step: the oldest groups that are finished, as far as the window goes."""
        self.runner.journal.note_generated(step)
        self._begin_ahead()  # in case the run has gone back to a checkpoint
        self._trained = []
        batch = self._make_batch(BatchProgress(step, step, None, self._timer))
        self._window.give_back(self._trained[len(batch.used) :])
        del self._trained[len(batch.used) :]
        self.runner.journal.add_taken(step, [self._threads[number].taken() for number in self._trained])
        self._batches[step] = dataclasses.replace(batch, metrics=batch.metrics | mean_versions(batch.episodes))
        return batch.episodes

    def _more_groups(self, groups: Sequence[Group], progress: BatchProgress) -> list[Group]:
        """Wait for the next groups to train on."""
        self._begin_ahead()  # groups that the step has filtered out make room
        wanted = self.cfg.trainer.train_batch_size
        recorded = self._recorded(progress.step, wanted)
        with self._timer("rollout"):
            while (numbers := self._take(wanted, recorded)) is None:
                self._awaited(recorded)[0].check_behind()
        self._trained += numbers
        failpoint("in_flight:taken")
        batches = [self._threads[number].result() for number in numbers]
        self._judge([self._threads[number] for number in numbers], progress.step)
        return [Group(batch.used[0].index, batch.episodes) for batch in batches]

    def _judge(self, threads: Sequence[GroupThread], step: int) -> None:
        """Log the failures of groups that a step has taken, and record these.

        Raises:
            UserError: too many have failed.
        """
        by_source: dict[str, list[GroupThread]] = {}
        for thread in threads:
            by_source.setdefault(self.ledger.row(thread.row).source, []).append(thread)
        for number, purpose in enumerate(_PURPOSES[: len(threads[0].calls)]):
            made = {source: [thread.calls[number] for thread in some] for source, some in by_source.items()}
            routes = self.runner.routes
            failures = [self._failures(source, calls) for source, calls in made.items() if routes[source].has_rewards]
            judge_failures(failures, purpose.format(step))
        for thread in threads:
            for call in thread.calls:
                call.accept()

    def _failures(self, source: str, calls: Sequence[_RecordedInFlight]) -> SourceFailures:
        """Return what has failed of a source in calls of groups."""
        reasons = [reason for call in calls for reason in call.failures]
        return SourceFailures(
            source, self.runner.routes[source].cfg, reasons, sum(len(call.requests) for call in calls)
        )

    def _recorded(self, step: int, wanted: int) -> list[int]:
        """Return the next groups that the step took before a kill. Empty: it may take any.

        Behind a smaller `rollout.max_staleness` or `rollout.window` they may be out of reach.
        """
        recorded = self.runner.journal.taken(step) or ()
        count = len(self._trained)
        if [group.row for group in recorded[:count]] != [self._threads[number].row for number in self._trained]:
            return []
        numbers = {self._threads[number].row: number for number in self._window.waiting}
        chosen = [numbers.get(group.row, -1) for group in recorded[count : count + wanted]]
        return chosen if self._window.can_take(chosen) else []

    def _awaited(self, recorded: Sequence[int]) -> list[GroupThread]:
        """Return the unfinished groups for which a step waits, the oldest first."""
        unfinished = self._window.unfinished
        return [self._threads[number] for number in unfinished if not recorded or number in recorded]

    def _note_needed(self, wanted: int, recorded: Sequence[int]) -> None:
        """Let groups that the step cannot do without wait for no later weights.

        Without a record of what the step took, any groups in reach may do. So none is given up as long as others can
        take its place.
        """
        reach = self._window.reach(wanted)
        waiting = {number for number in self._window.unfinished if self._threads[number].is_waiting}
        is_stuck = not self._window.can_take_without(waiting, wanted)
        needed = recorded or (reach[:wanted] if is_stuck or len(reach) <= wanted else ())
        for number in needed:
            self._threads[number].is_needed = True

    def _take(self, wanted: int, recorded: Sequence[int]) -> list[int] | None:
        """Return the next groups. None: they are not finished; it has waited a moment for them.

        Args:
            recorded: the groups to take; empty: any.
        """
        for number in self._window.unfinished:
            if self._threads[number].has_ended():
                self._threads[number].result()  # raises what has ended the thread
                self._window.finish(number)
        numbers = self._window.take_those(recorded) if recorded else self._window.take(wanted)
        if numbers is None:
            self._note_needed(wanted, recorded)
            running = self._awaited(recorded)
            # Every call that a thread makes has a time limit.
            with self.ended, SIGNALS.waiting_for(running[0].name):
                self.ended.wait_for(lambda: any(thread.has_ended() for thread in running), time_limits.POLL_INTERVAL_S)
        return numbers

    def make_group(self, progress: BatchProgress) -> StepBatch:
        """Sample one group, on its thread."""
        assert isinstance(progress, GroupThread)
        groups = self._sample([progress.row], progress, is_last=not self._needs_baselines)
        if self._needs_baselines:
            groups = super()._with_baselines(groups, progress)
        failpoint("in_flight:finished")
        return StepBatch(groups[0].episodes, [UsedRow(groups[0].index, groups[0].mean_reward)], {})

    def _with_baselines(self, groups: Sequence[Group], progress: BatchProgress) -> list[Group]:
        return list(groups)  # their threads have computed them

    def parts(self) -> list[Component]:
        """Return the part with the histories of the weights, by which groups in the journal are valid.

        The part of the steps ahead is empty. It warns of rollouts that a run with `rollout.ahead` has saved.
        """
        shape: dict[Any, Any] = {"histories": {str: str}}
        part = json_part("in_flight", self.histories.state_dict, self.histories.load_state_dict, shape, kinds=("data",))
        ahead = [dataclasses.replace(of_ahead, if_missing="") for of_ahead in super().parts()]
        return [*ahead, dataclasses.replace(part, if_missing="was not sampled in flight")]

    def _cancel(self) -> None:
        threads, self._threads = list(self._threads.values()), {}
        end_threads(threads, self._engines.abort)
        self.running = "abort"  # nobody waits for what the engines still generate
        self._window, self._trained = self._new_window(), []
        super()._cancel()
