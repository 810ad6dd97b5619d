"""The thread that writes the records."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trainer.checkpoint.storage import TURNS
from trainer.data.records import encode_groups
from trainer.episodes import Episode
from trainer.errors import UserError, describe_error, one_line
from trainer.journal.files import RecordFiles, is_full
from trainer.journal.turns import TurnRecord, encode_turns
from trainer.process import time_limits
from trainer.process.tracing import TRACER

LOG = logging.getLogger(__name__)

_SHARE, _SHARE_OF_TURNS = 0.01, 0.002
"""Of the time since a step got its first record: so much may go by before the next file. Episodes that take half an
hour would else give thousands of files. Less for turns, of which a kill should cost one."""


@dataclass
class _Batch:
    """What goes into one file: groups by key."""

    step: int
    about: Mapping[str, str]
    """Metadata of the file."""
    groups: dict[str, Sequence[Episode]] = field(default_factory=dict)
    turns: list[TurnRecord] = field(default_factory=list)
    """Of episodes that still run. They go into a file of their own."""


class Writer:
    """Writes groups on a thread, those of half a second in one file; of more time where the batch takes long.

    If they cannot be written, it stops, and training continues. It tries again at a later step (`retry`): not as long
    as a write hangs, and not after the disk was full, because then checkpoints need the room more.
    """

    def __init__(self, files: RecordFiles):
        self._files = files
        self._condition = threading.Condition()
        self._queue: list[_Batch] = []
        self._added = 0  # batches that were ever queued
        self._written = 0
        self._is_urgent = False
        self._begun: dict[int, float] = {}  # when each step got its first record since the last flush
        self._has_turns = False
        self._is_stopped = False
        self._is_told = False  # that nothing is recorded
        self._retry_at = -math.inf
        self._is_closed = False
        self._lost: UserError | None = None
        self._thread: threading.Thread | None = None

    def add(
        self,
        step: int,
        groups: Mapping[str, Sequence[Episode]],
        about: dict[str, str],
        turns: Sequence[TurnRecord] = (),
    ) -> None:
        with self._condition:
            if self._is_stopped or self._is_closed:
                return
            # Steps may alternate: the next one is sampled while the one before it is evaluated.
            for batch in self._queue:
                if batch.step == step and batch.about == about:
                    break
            else:
                self._begun.setdefault(step, time.monotonic())
                self._queue.append(batch := _Batch(step, about))
                self._added += 1
                self._begin()
            batch.groups |= groups
            batch.turns += turns
            self._has_turns |= bool(turns)

    def flush(self) -> None:
        """Let the thread write without waiting for more groups."""
        with self._condition:
            self._is_urgent = bool(self._queue)
            self._begun.clear()  # what a step records after that is another batch, such as its evaluation
            self._condition.notify_all()

    def retry(self, is_start: bool = False) -> None:
        """Record again if it has stopped, some time has passed, and nothing of then is still under way.

        Args:
            is_start: the ranks have started again: try in any case, also after the disk was full.
        """
        with self._condition:
            self._is_told = self._is_told and not is_start
            is_due = is_start or time.monotonic() >= self._retry_at
            if self._is_stopped and self._lost is None and self._written == self._added and is_due:
                self._is_stopped = False

    def free_space(self, reason: str) -> None:
        """Stop, and delete all records: something else had no space on the disk. Any thread may call this."""
        with self._condition:
            if not self._is_given_up:
                self._stop(reason, disk_is_full=True)
        self._delete_all()
        with self._condition:
            self._condition.notify_all()

    def is_idle(self) -> bool:
        """Return whether nothing is to be written, and no error is to be raised."""
        with self._condition:
            return self._written == self._added and self._lost is None

    def wait(self) -> None:
        """Wait until all groups that have been added are durable, or the journal has stopped.

        Another thread may add more meanwhile.

        Raises:
            UserError: another job holds the run directory.
        """
        with self._condition:
            wanted = self._added
            while (written := self._written) < wanted and not self._is_stopped:
                self.flush()
                if not self._condition.wait_for(
                    lambda: self._written > written or self._is_stopped, time_limits.JOURNAL_WAIT_S
                ):
                    self._stop(f"{self._files.directory}: nothing was written in {time_limits.JOURNAL_WAIT_S:g} s")
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
        with contextlib.suppress(Exception):  # the first write raises it again
            encode_groups(0, {}, {})  # imports the format, which takes half a second: a step need not wait for it
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._queue or self._is_closed)
                self._condition.wait_for(lambda: self._is_urgent or self._is_closed, self._delay_s())
                batches, self._queue, self._is_urgent = self._queue, [], False
                if self._is_closed and not batches:
                    return
            for batch in batches:
                self._write(batch)
                with self._condition:
                    self._written += 1
                    self._condition.notify_all()

    def _delay_s(self) -> float:
        """Return how long the next file may wait for more."""
        now = time.monotonic()
        begun = min((self._begun.get(batch.step, now) for batch in self._queue), default=now)
        least, share = time_limits.JOURNAL_FLUSH_S, _SHARE_OF_TURNS if self._has_turns else _SHARE
        if not any(batch.groups for batch in self._queue):  # turns alone: a file costs as much as 30 of them
            least *= 2
        return max(least, share * (now - begun))

    def _write(self, batch: _Batch) -> None:
        if self._is_stopped:
            return
        try:
            with TRACER.span("write rollouts", "journal", groups=len(batch.groups)):
                # Of an episode that has ended meanwhile, the group has all.
                if turns := [turn for turn in batch.turns if turn.is_company or turn.key not in batch.groups]:
                    self._files.write(batch.step, encode_turns(turns, batch.about), TURNS)
                if batch.groups:
                    self._files.write(batch.step, encode_groups(batch.step, batch.groups, batch.about))
        except OSError as error:  # also of a store, whose errors are for users, too
            with self._condition:
                self._stop(one_line(str(error)), is_full(error))
            if is_full(error):  # checkpoints need the room more
                self._delete_all()
        except UserError as error:  # another job has taken the run
            with self._condition:
                self._lost, self._is_stopped = error, True
        except Exception as error:  # a step must not train on groups that it takes for recorded
            with self._condition:
                self._stop(describe_error(error))
        else:
            if self._is_given_up:  # by another thread, during the write
                self._delete_all()
            with self._condition:
                if self._is_told and not self._is_stopped:
                    self._is_told = False
                    LOG.info("rollout.journal: rollouts are recorded again, from step %d on", batch.step)

    @property
    def _is_given_up(self) -> bool:
        """Whether the disk was full, and the ranks have not started again since then."""
        return self._is_stopped and self._retry_at == math.inf

    def _delete_all(self) -> None:
        with contextlib.suppress(OSError, UserError):
            self._files.delete(lambda step: True)

    def _stop(self, reason: str, disk_is_full: bool = False) -> None:
        if not self._is_stopped:  # else by a wait that has ended
            self._is_stopped, self._written, self._queue = True, self._written + len(self._queue), []
            self._retry_at = time.monotonic() + time_limits.JOURNAL_RETRY_S
        if disk_is_full:
            self._retry_at = math.inf
        if self._is_told and not disk_is_full:
            return
        self._is_told = True
        LOG.warning(
            "rollout.journal: rollouts are not recorded %s (%s); training continues, and a kill costs the rollouts "
            "since the last checkpoint",
            "any more" if disk_is_full else "until a later try succeeds",
            reason,
        )
