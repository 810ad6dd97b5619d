"""The journal: finished groups of episodes, durable before a step trains on them, and found again after a kill."""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from trainer.checkpoint.storage import Storage
from trainer.data.records import decode_groups, encode_groups
from trainer.episodes import Episode
from trainer.errors import UserError, one_line
from trainer.journal.history import Identity, after, digest
from trainer.journal.pieces import Pieces, Upkeep
from trainer.process import time_limits
from trainer.process.tracing import TRACER

LOG = logging.getLogger(__name__)

_FULL = (errno.ENOSPC, errno.EDQUOT)
_DAMAGED = "damaged files"
_OTHER_CONFIG, _OTHER_HISTORY = "of another config or other code", "of another history"
_OTHER_PROMPTS = "of other prompts or samplings"


class Journal:
    """The records of one run. It writes on a thread of its own.

    Any thread may find and add groups, and make keys for a history. All else is for the thread that made the journal,
    the one that trains: only this thread knows which weights sample now.

    A record is a group of episodes under a key. The key is a digest of all that decides the episodes, so a record of
    another history, config or prompt has another key.

    Args:
        settings: digests of the config.
        fence: raises if this process no longer holds the run directory.
        storage: of the checkpoints, if that is no disk: records are copied there.
        store_fence: raises if this process no longer holds the checkpoints.
        is_on: whether records are written and used. The history is kept in any case.
        timer: of the step.
    """

    def __init__(
        self,
        run_dir: str,
        settings: Identity,
        fence: Callable[[], None],
        storage: Storage | None = None,
        store_fence: Callable[[], None] = lambda: None,
        is_on: bool = True,
        timer: Callable[[str], AbstractContextManager[None]] = nullcontext,
    ):
        self._history = ""
        self._thread = threading.get_ident()
        self._settings = settings
        self._timer = timer
        self._pieces = Pieces(run_dir, fence)
        self._upkeep = Upkeep(self._pieces, storage, store_fence)
        self.is_on = is_on
        """Whether records are written and used."""
        self._writer = _Writer(self._pieces, self._upkeep.copy)
        self._replay: _Replay | None = None
        self._replaying = threading.Lock()
        self._step = 0  # the last one that is trained
        self._has_all: dict[int, bool] = {}

    @property
    def settings(self) -> Mapping[str, str]:
        """Digests of the settings that decide rollouts and rewards, by key."""
        return self._settings.by_key

    @property
    def history(self) -> str:
        """Of the weights that sample now. Those who sample ahead keep it, to find and to add groups by it later."""
        self._check_thread()
        return self._history

    # ---------------------------------------------------------------------------------------------------
    # The run

    @property
    def beginning(self) -> str:
        """A digest of the weights, and of the settings that decide what the next steps do with them."""
        return digest(self.history, self._settings.updates)

    def start(self, step: int, history: str) -> None:
        """Continue behind a step, whose weights have this history; find the records of the steps after it."""
        self._check_thread()
        self._history, self._step = history, step
        self._has_all.clear()
        self._end_replay()
        if not self.is_on:
            return
        self._writer.wait()

        def is_ahead(of: int) -> bool:
            return of > step or step == 0  # the initial weights are evaluated as step 0

        self._upkeep.fetch(is_ahead)
        names = {name: of for name, of in self._pieces.names().items() if is_ahead(of)}
        self._replay = _Replay(self._pieces, self._settings.rollouts, names) if names else None

    def trained(self, episodes: Iterable[Episode]) -> None:
        """Note the episodes that the next step has trained on: the weights have another history now."""
        self._check_thread()
        self._history = after(self.history, episodes, self._settings)
        self._step += 1
        with self._replaying:
            self._has_all = {step: has_all for step, has_all in self._has_all.items() if step >= self._step}
            if self._replay is None:
                return
            self._replay.end_before(self._step)  # its evaluation is still to come
            is_over = self._replay.is_over
        if is_over:
            self._end_replay()

    def remove_until(self, oldest: Callable[[], int]) -> None:
        """Begin to delete the records of the steps up to `oldest()`, which is called on another thread."""
        if self.is_on:
            self._upkeep.remove_until(oldest)

    def remove_after(self, step: int) -> None:
        """Delete the records of the steps after `step`: the run goes back, and generates them again."""
        self._check_thread()
        self._end_replay()
        self._writer.wait()
        with contextlib.suppress(OSError):
            self._upkeep.remove(lambda of: of > step)

    def settled(self, timeout_s: float) -> bool:
        """Wait until all deletions and copies that have begun are done; return whether they are."""
        return self._upkeep.wait(timeout_s)

    def close(self) -> None:
        """Write what is left, and end the threads."""
        self._check_thread()
        self._end_replay()
        self._writer.close()
        self._upkeep.close()

    # ---------------------------------------------------------------------------------------------------
    # Groups

    def key(self, step: int, *decides: Any, history: str | None = None) -> str:
        """Return the key of a group.

        Args:
            step: the one that trains on it.
            decides: all that decides its episodes besides the weights and the config.
            history: of the weights that sample it; None: those of now.
        """
        return digest(self._of(history), self._settings.rollouts, step, *decides)

    def find(self, step: int, keys: Sequence[str], history: str | None = None) -> dict[str, list[Episode]]:
        """Return the groups of a step that have a record, by key. Steps ahead may be asked for in any order."""
        history = self._of(history)
        with self._replaying:
            found = {} if self._replay is None else self._replay.find(step, history, keys)
            self._has_all[step] = self._has_all.get(step, True) and len(found) == len({*keys})
        return found

    def has_records(self, step: int) -> bool:
        """Return whether there are records of a step. It may still be that none of them can be used."""
        with self._replaying:
            return self._replay is not None and self._replay.has_records(step)

    def note_found(self, step: int) -> None:
        """Note that episodes of a step are those of before a resume, though they did not come from here."""
        with self._replaying:
            self._has_all.setdefault(step, True)

    def candidates(self, key: str) -> list[tuple[int, str, list[Episode]]]:
        """Return the records of a group that was sampled in flight, the oldest first.

        Each is a version and its history (see `add`), and the episodes. Who takes one says so (`note_in_flight`).
        """
        with self._replaying:
            return [] if self._replay is None else self._replay.candidates(key)

    def note_in_flight(self, key: str, is_found: bool) -> None:
        """Note whether a record of a group was taken, or its episodes are generated."""
        with self._replaying:
            if self._replay is not None:
                self._replay.note(key, is_found)

    def note_generated(self, step: int) -> None:
        """Note that a step trains on episodes that may have been generated anew (see `has_all`)."""
        with self._replaying:
            self._has_all[step] = False

    def has_all(self, step: int) -> bool:
        """Return whether groups of a step were looked for, and all had a record. It is forgotten a step later."""
        with self._replaying:
            return self._has_all.get(step, False)

    def prepare(self) -> None:
        """Begin to import what writes records, while this thread waits for others."""
        if self.is_on:
            self._writer.prepare()

    def add(
        self,
        step: int,
        groups: Mapping[str, Sequence[Episode]],
        history: str | None = None,
        version: int | None = None,
    ) -> None:
        """Begin to write finished groups, by key. They appear in one file, so all of them are kept or none.

        Args:
            step: the one that trains on them, or the last one that may. Later, the records can be deleted.
            history: of the weights that sampled them; in flight, of the newest ones that may have. None: of those of
                now.
            version: of these weights, in flight.
        """
        if self.is_on and groups:
            about = {"history": self._of(history), "config": self._settings.rollouts}
            if version is not None:
                about["version"] = str(version)
            self._writer.add(step, groups, about)

    def flush(self) -> None:
        """Begin to write what waits for more groups: none will come soon."""
        self._writer.flush()

    def wait(self) -> None:
        """Wait until all groups that have been added are durable.

        Raises:
            UserError: another job holds the run directory.
        """
        self._check_thread()
        if not self._writer.is_idle():
            with self._timer("journal"):
                self._writer.wait()

    def _of(self, history: str | None) -> str:
        return self.history if history is None else history

    def _check_thread(self) -> None:
        assert threading.get_ident() == self._thread, "only the thread that trains may ask for this"

    def _end_replay(self) -> None:
        with self._replaying:
            replay, self._replay = self._replay, None
        if replay is not None:
            replay.report()


_Records = dict[str, tuple[list[Episode], dict[str, str]]]
"""Groups by key, each with what is known of it."""


@dataclass
class _ReplayedStep:
    groups: _Records
    histories: set[str] = field(default_factory=set)
    used: set[str] = field(default_factory=set)


class _Replay:
    """The records that are there at a start, step by step."""

    def __init__(self, pieces: Pieces, config: str, names: Mapping[str, int]):
        self._pieces = pieces
        self._config = config
        self._names: dict[int, list[str]] = {}
        for name, step in names.items():
            self._names.setdefault(step, []).append(name)
        self._steps = (min(self._names), max(self._names))
        self._open: dict[int, _ReplayedStep] = {}
        self._counts: Counter[str] = Counter()
        self.is_over = False
        """The run is behind the last step that has records."""

    def find(self, step: int, history: str, keys: Sequence[str]) -> dict[str, list[Episode]]:
        if step > self._steps[1]:
            return {}
        if step not in self._open:
            self._open[step] = _ReplayedStep(self._read(step))
        opened = self._open[step]
        opened.histories.add(history)
        found = {key: opened.groups[key][0] for key in keys if key in opened.groups}
        opened.used |= found.keys()
        self._counts["found"] += len(found)
        self._counts["generated"] += len(keys) - len(found)
        return found

    def has_records(self, step: int) -> bool:
        return step in self._open or step in self._names

    def candidates(self, key: str) -> list[tuple[int, str, list[Episode]]]:
        for step in list(self._names):
            self._open[step] = _ReplayedStep(self._read(step))
        records = [opened.groups[key] for opened in self._open.values() if key in opened.groups]
        found = [(int(about["version"]), about["history"], group) for group, about in records if "version" in about]
        return sorted(found, key=lambda record: record[0])

    def note(self, key: str, is_found: bool) -> None:
        for opened in self._open.values():
            if is_found and key in opened.groups:
                opened.used.add(key)
        self._counts["found" if is_found else "generated"] += 1

    def end_before(self, step: int) -> None:
        """Forget the steps before `step`: no one asks for them again."""
        for ended in [number for number in self._open if number < step]:
            self._end_step(self._open.pop(ended))
        self.is_over = step > self._steps[1]

    def report(self) -> None:
        """Log how many groups came from the journal, and why others did not."""
        for step in self._open.values():
            self._end_step(step)
        counts = self._counts
        reasons = [
            f"{counts[name]} {name}"
            for name in (_DAMAGED, _OTHER_CONFIG, _OTHER_HISTORY, _OTHER_PROMPTS)
            if counts[name]
        ]
        LOG.info(
            "rollout.journal: of steps %d to %d, %d groups came from the journal and %d were generated%s",
            *self._steps,
            counts["found"],
            counts["generated"],
            f"; not used: {', '.join(reasons)}" if reasons else "",
        )

    def _read(self, step: int) -> _Records:
        records: _Records = {}
        for name in self._names.pop(step, []):
            try:
                groups, about = decode_groups(self._pieces.read(name))
            except FileNotFoundError:  # deleted since, by a commit
                continue
            except (OSError, ValueError) as error:
                LOG.warning(
                    "rollout.journal: %s in %s is damaged (%s); its groups are generated again",
                    name,
                    self._pieces.directory,
                    one_line(str(error)),
                )
                self._counts[_DAMAGED] += 1
                continue
            records |= {key: (episodes, about) for key, episodes in groups.items()}
        return records

    def _end_step(self, step: _ReplayedStep) -> None:
        for key in step.groups.keys() - step.used:
            about = step.groups[key][1]
            if about.get("config") != self._config:
                reason = _OTHER_CONFIG
            elif about.get("history") not in step.histories:
                reason = _OTHER_HISTORY
            else:
                reason = _OTHER_PROMPTS
            self._counts[reason] += 1


class _Writer:
    """Writes groups on a thread, those of half a second in one file.

    Args:
        written: called with the name of each file.
    """

    def __init__(self, pieces: Pieces, written: Callable[[str], None]):
        self._pieces = pieces
        self._written = written
        self._condition = threading.Condition()
        self._queue: list[tuple[int, dict[str, str], dict[str, Sequence[Episode]]]] = []
        self._added = 0  # batches that were ever queued
        self._written_batches = 0
        self._is_urgent = False
        self._is_stopped = False
        self._is_closed = False
        self._lost: UserError | None = None
        self._thread: threading.Thread | None = None

    def prepare(self) -> None:
        """Start the thread, and let it import what it writes with."""
        with self._condition:
            self._begin()

    def add(self, step: int, groups: Mapping[str, Sequence[Episode]], about: dict[str, str]) -> None:
        with self._condition:
            if self._is_stopped or self._is_closed:
                return
            last = self._queue[-1] if self._queue else None
            if last is not None and last[0] == step and last[1] == about:
                last[2].update(groups)
            else:
                self._queue.append((step, about, dict(groups)))
                self._added += 1
            self._begin()

    def flush(self) -> None:
        """Let the thread write without waiting for more groups."""
        with self._condition:
            self._is_urgent = bool(self._queue)
            self._condition.notify_all()

    def is_idle(self) -> bool:
        """Return whether nothing is to be written, and no error is to be raised."""
        with self._condition:
            return self._written_batches == self._added and self._lost is None

    def wait(self) -> None:
        """Wait until all groups that have been added are durable, or the journal has stopped.

        Another thread may add more meanwhile.

        Raises:
            UserError: another job holds the run directory.
        """
        end = time.monotonic() + time_limits.JOURNAL_WAIT_S
        with self._condition:
            wanted = self._added
            while self._written_batches < wanted and not self._is_stopped:
                self.flush()
                left = end - time.monotonic()
                if left <= 0:
                    self._stop(f"{self._pieces.directory}: nothing was written in {time_limits.JOURNAL_WAIT_S:g} s")
                    break
                self._condition.wait(left)
            if self._lost is not None:
                raise self._lost

    def close(self) -> None:
        with contextlib.suppress(UserError):
            self.wait()
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()
        if self._thread is not None:
            self._thread.join(time_limits.JOURNAL_WAIT_S)
            self._thread = None

    def _begin(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
            self._thread.start()
        self._condition.notify_all()

    def _run(self) -> None:
        encode_groups(0, {}, {})  # imports the format, which takes half a second: a step need not wait for it
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._queue or self._is_closed)
                self._condition.wait_for(lambda: self._is_urgent or self._is_closed, time_limits.JOURNAL_FLUSH_S)
                batches, self._queue, self._is_urgent = self._queue, [], False
                if self._is_closed and not batches:
                    return
            try:
                for step, about, groups in batches:
                    self._write(step, about, groups)
            finally:
                with self._condition:
                    self._written_batches += len(batches)
                    self._condition.notify_all()

    def _write(self, step: int, about: dict[str, str], groups: Mapping[str, Sequence[Episode]]) -> None:
        if self._is_stopped:
            return
        try:
            with TRACER.span("write rollouts", "journal", groups=len(groups)):
                self._written(self._pieces.write(step, encode_groups(step, groups, about)))
        except UserError as error:  # another job has taken the run
            with self._condition:
                self._lost, self._is_stopped = error, True
        except (OSError, ValueError) as error:
            with self._condition:
                self._stop(one_line(str(error)))
            if isinstance(error, OSError) and error.errno in _FULL:  # checkpoints need the room more
                self._pieces.delete(list(self._pieces.names()))

    def _stop(self, reason: str) -> None:
        self._is_stopped, self._written_batches = True, self._written_batches + len(self._queue)
        self._queue = []
        LOG.warning(
            "rollout.journal: rollouts are not recorded any more (%s); training continues, and a kill costs the "
            "rollouts since the last checkpoint",
            reason,
        )
