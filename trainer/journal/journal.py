"""The journal: finished episodes, durable before a step trains on them, and found again after a kill."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from trainer.checkpoint.storage import TURNS, Storage
from trainer.data.records import encode_groups
from trainer.episodes import Episode
from trainer.errors import UserError, describe_error, one_line
from trainer.journal.files import RecordFiles, is_full
from trainer.journal.history import Identity, after, digest
from trainer.journal.replay import Replay
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
    about: Mapping[str, str]  # metadata of the file
    groups: dict[str, Sequence[Episode]] = field(default_factory=dict)
    turns: list[TurnRecord] = field(default_factory=list)
    """Of episodes that still run. They go into a file of their own."""


class Journal:
    """The records of one run. It writes on a thread of its own: what comes within half a second goes into one file, or
    within more time where a batch takes long.

    If records cannot be written, it stops, and training continues. It tries again at a later step: not as long as a
    write hangs, and not after the disk was full, because then checkpoints need the room more.

    Any thread may add groups, and make keys for a history. All else is for the thread that made the journal,
    the one that trains: only this thread knows which weights sample now.

    A record is an episode, or a group of them, under a key. The key is a digest of all that decides the episodes, so a
    record of another history, config or prompt has another key. The methods speak of groups for both.

    Args:
        settings: digests of the config.
        fence: raises if this process no longer holds the run.
        storage: of the checkpoints, if that is no disk: records are written there.
        is_on: whether records are written and used. The history is kept in any case.
        tells_lack: a start behind a step says if there are no records of the next ones.
        timer: of the step.
    """

    def __init__(
        self,
        run_dir: str,
        settings: Identity,
        fence: Callable[[], None],
        storage: Storage | None = None,
        is_on: bool = True,
        tells_lack: bool = False,
        timer: Callable[[str], AbstractContextManager[None]] = nullcontext,
    ):
        self._history = ""
        self._owner = threading.get_ident()
        self._settings = settings
        self._timer = timer
        self._files = RecordFiles(run_dir, storage, fence)
        self._deletions: list[threading.Thread] = []
        self._tells_lack = tells_lack
        self.is_on = is_on  # whether records are written and used
        self.replay = Replay(self._files, {})  # the records that were there at the start
        self._step = 0  # the last one that is trained
        self._condition = threading.Condition()  # guards all that follows
        self._queue: list[_Batch] = []
        self._added = self._written = 0  # batches that were ever queued
        self._is_urgent = False
        self._begun: dict[int, float] = {}  # when each step got its first record since the last flush
        self._has_turns = False
        self._is_stopped = False
        self._is_told = False  # that nothing is recorded
        self._retry_at = -math.inf
        self._is_closed = False
        self._lost: UserError | None = None
        self._thread: threading.Thread | None = None

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

    def start(self, step: int, history: str) -> None:
        """Continue behind a step, whose weights have this history; find the records of the steps after it."""
        self._check_thread()
        self._history, self._step = history, step
        self.replay.close()
        self._wait_written()
        if not self.is_on:
            # The run trains and logs these steps in another way now. A comparison with its log must not use them.
            self._files.delete(lambda of: of > step)
            return
        self._retry(is_start=True)
        names = self._files.open(lambda of: of > step or step == 0)  # the initial weights are evaluated as step 0
        self.replay = Replay(self._files, names)
        if step and not names and self._tells_lack:
            LOG.info("rollout.journal: there are no records of the steps after %d", step)

    def trained(self, episodes: Iterable[Episode]) -> None:
        """Note the episodes that the next step has trained on: the weights have another history now."""
        self._check_thread()
        self._history = after(self.history, episodes, self._settings)
        self._step += 1
        self._retry()
        self.replay.end_before(self._step)  # its evaluation is still to come

    def remove_until(self, oldest: Callable[[], int]) -> None:
        """Begin to delete the records of the steps up to `oldest()`, which is called on another thread."""

        def remove() -> None:
            try:
                if (last := oldest()) > 0:
                    self._files.delete(lambda step: step <= last)
            except Exception as error:  # it costs space alone, and the next commit tries again
                known = isinstance(error, (OSError, UserError))
                LOG.warning(
                    "rollout.journal: old records are not deleted (%s); training continues",
                    one_line(str(error)) if known else describe_error(error),
                )

        if self.is_on:
            thread = threading.Thread(target=remove, name="journal-deletions", daemon=True)
            thread.start()  # first: another thread may wait for all that are in the list
            self._deletions = [one for one in self._deletions if one.is_alive()] + [thread]

    def remove_after(self, step: int) -> None:
        """Delete the records of the steps after `step`: the run goes back, and generates them again.

        Raises:
            OSError: they cannot be deleted.
        """
        self._check_thread()
        self.replay.close()
        self._wait_written()
        self._files.delete(lambda of: of > step)

    def free_space(self) -> None:
        """Stop, and delete all records: a checkpoint had no space on the disk. Any thread may call this."""
        if self.is_on and self._files.is_on_disk:
            with self._condition:
                if not self._is_given_up:
                    self._stop("a checkpoint has found the disk full", disk_is_full=True)
            self._delete_all()
            with self._condition:
                self._condition.notify_all()

    def settled(self, timeout_s: float) -> bool:
        """Wait until all deletions that have begun are done; return whether they are."""
        end = time.monotonic() + timeout_s
        for thread in self._deletions:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._deletions)

    def close(self) -> None:
        """Write what is left, and end the threads."""
        self._check_thread()
        self.replay.close()
        with contextlib.suppress(UserError):
            self._wait_written()
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()
        if self._thread is not None:
            self._thread.join(time_limits.JOURNAL_WAIT_S)
            self._thread = None
        self.settled(time_limits.JOURNAL_CLOSE_S)

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

    def add(
        self,
        step: int,
        groups: Mapping[str, Sequence[Episode]],
        history: str | None = None,
        version: int | None = None,
        turns: Sequence[TurnRecord] = (),
    ) -> None:
        """Begin to write finished episodes or groups, by key. They appear in one file, so all of them are kept or none.

        Args:
            step: the one that trains on them, or the last one that may. Later, the records can be deleted.
            history: of the weights that sampled them; in flight, of the newest ones that may have. None: of those of
                now.
            version: of these weights, in flight.
            turns: of episodes that still run.
        """
        if not self.is_on or not (groups or turns):
            return
        about = {"history": self._of(history), "config": self._settings.rollouts}
        if version is not None:
            about["version"] = str(version)
        with self._condition:
            if self._is_stopped or self._is_closed:
                return
            # Steps may alternate: the next one is sampled while the one before it is evaluated.
            same = (batch for batch in self._queue if batch.step == step and batch.about == about)
            if (batch := next(same, None)) is None:
                self._begun.setdefault(step, time.monotonic())
                self._queue.append(batch := _Batch(step, about))
                self._added += 1
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
                    self._thread.start()
                self._condition.notify_all()
            batch.groups |= groups
            batch.turns += turns
            self._has_turns |= bool(turns)

    def flush(self) -> None:
        """Begin to write what waits for more groups: none will come soon."""
        with self._condition:
            self._is_urgent = bool(self._queue)
            self._begun.clear()  # what a step records after that is another batch, such as its evaluation
            self._condition.notify_all()

    def wait(self) -> None:
        """Wait until all groups that have been added are durable.

        Raises:
            UserError: another job holds the run directory.
        """
        self._check_thread()
        if not self.is_idle():
            with self._timer("journal"):
                self._wait_written()

    def is_idle(self) -> bool:
        """Return whether nothing is to be written, and no error is to be raised."""
        with self._condition:
            return self._written == self._added and self._lost is None

    def _of(self, history: str | None) -> str:
        return self.history if history is None else history

    def _check_thread(self) -> None:
        assert threading.get_ident() == self._owner, "only the thread that trains may ask for this"

    # ---------------------------------------------------------------------------------------------------
    # The thread that writes

    def _retry(self, is_start: bool = False) -> None:
        """Record again if it has stopped, some time has passed, and nothing of then is still under way.

        Args:
            is_start: the ranks have started again: try in any case, also after the disk was full.
        """
        with self._condition:
            self._is_told = self._is_told and not is_start
            is_due = is_start or time.monotonic() >= self._retry_at
            if self._is_stopped and self._lost is None and self._written == self._added and is_due:
                self._is_stopped = False

    def _wait_written(self) -> None:
        """Wait until all that has been added is durable, or the journal has stopped. More may be added meanwhile."""
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
