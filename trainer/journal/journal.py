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
from typing import Any

from trainer.checkpoint.storage import Storage
from trainer.data.records import decode, encode
from trainer.episodes import Episode
from trainer.errors import UserError, one_line
from trainer.journal.history import Identity, after, digest
from trainer.journal.pieces import Pieces, Upkeep
from trainer.process import time_limits

LOG = logging.getLogger(__name__)

_FULL = (errno.ENOSPC, errno.EDQUOT)
_DAMAGED = "damaged files"
_OTHER_CONFIG, _OTHER_HISTORY = "of another config", "of another history"
_OTHER_PROMPTS = "of other prompts or samplings"


class Journal:
    """The records of one run. Used by the main thread alone; it writes on a thread of its own.

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
        self.history = ""
        """Of the weights that sample now."""
        self._settings = settings
        self._timer = timer
        self._pieces = Pieces(run_dir, fence)
        self._upkeep = Upkeep(self._pieces, storage, store_fence)
        self.is_on = is_on
        """Whether records are written and used."""
        self._writer = _Writer(self._pieces, self._upkeep.copy)
        self._replay: _Replay | None = None

    # ---------------------------------------------------------------------------------------------------
    # The run

    def start(self, step: int, history: str) -> None:
        """Continue behind a step, whose weights have this history; find the records of the steps after it."""
        self.history = history
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
        """Note the episodes that a step has trained on: the weights have another history now."""
        self.history = after(self.history, episodes, self._settings)

    def remove_until(self, oldest: Callable[[], int]) -> None:
        """Begin to delete the records of the steps up to `oldest()`, which is called on another thread."""
        if self.is_on:
            self._upkeep.remove_until(oldest)

    def remove_after(self, step: int) -> None:
        """Delete the records of the steps after `step`: the run goes back, and generates them anew."""
        self._end_replay()
        self._writer.wait()
        with contextlib.suppress(OSError):
            self._upkeep.remove(lambda of: of > step)

    def settled(self, timeout_s: float) -> bool:
        """Wait until all deletions and copies that have begun are done; return whether they are."""
        return self._upkeep.wait(timeout_s)

    def close(self) -> None:
        """Write what is left, and end the threads."""
        self._end_replay()
        self._writer.close()
        self._upkeep.close()

    # ---------------------------------------------------------------------------------------------------
    # Groups

    def key(self, step: int, *decides: Any) -> str:
        """Return the key of a group that the current weights sample.

        Args:
            decides: all that decides its episodes besides the weights and the config.
        """
        return digest(self.history, self._settings.rollouts, step, *decides)

    def find(self, step: int, keys: Sequence[str]) -> dict[str, list[Episode]]:
        """Return the groups of a step that have a record, by key."""
        if self._replay is None:
            return {}
        found = self._replay.find(step, self.history, keys)
        if self._replay.is_over:
            self._end_replay()
        return found

    def add(self, step: int, groups: Mapping[str, Sequence[Episode]]) -> None:
        """Begin to write finished groups, by key. They appear in one file, so all of them are kept or none."""
        if self.is_on and groups:
            about = {"history": self.history, "config": self._settings.rollouts}
            self._writer.add(step, groups, about)

    def flush(self) -> None:
        """Begin to write what waits for more groups: none will come soon."""
        self._writer.flush()

    def wait(self) -> None:
        """Wait until all groups are durable.

        Raises:
            UserError: another job holds the run directory.
        """
        if not self._writer.is_idle():
            with self._timer("journal"):
                self._writer.wait()

    def _end_replay(self) -> None:
        if self._replay is not None:
            self._replay.report()
            self._replay = None


class _Replay:
    """The records that are there at a start, step by step."""

    def __init__(self, pieces: Pieces, config: str, names: Mapping[str, int]):
        self._pieces = pieces
        self._config = config
        self._names: dict[int, list[str]] = {}
        for name, step in names.items():
            self._names.setdefault(step, []).append(name)
        self._steps = (min(self._names), max(self._names))
        self._step: int | None = None
        self._groups: dict[str, tuple[list[Episode], dict[str, str]]] = {}  # of this step, with what is known of them
        self._histories: set[str] = set()
        self._used: set[str] = set()
        self._counts: Counter[str] = Counter()
        self.is_over = False
        """The run is behind the last step that has records."""

    def find(self, step: int, history: str, keys: Sequence[str]) -> dict[str, list[Episode]]:
        if step != self._step:
            self._end_step()
            self._begin(step)
        self.is_over = step > self._steps[1]
        if self.is_over:
            return {}
        self._histories.add(history)
        found = {key: self._groups[key][0] for key in keys if key in self._groups}
        self._used |= found.keys()
        self._counts["found"] += len(found)
        self._counts["generated"] += len(keys) - len(found)
        return found

    def report(self) -> None:
        """Log how many groups came from the journal, and why others did not."""
        self._end_step()
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

    def _begin(self, step: int) -> None:
        self._step = step
        for name in self._names.pop(step, []):
            try:
                groups, about = decode(self._pieces.read(name))
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
            self._groups |= {key: (episodes, about) for key, episodes in groups.items()}

    def _end_step(self) -> None:
        for key in self._groups.keys() - self._used:
            about = self._groups[key][1]
            if about.get("config") != self._config:
                reason = _OTHER_CONFIG
            elif about.get("history") not in self._histories:
                reason = _OTHER_HISTORY
            else:
                reason = _OTHER_PROMPTS
            self._counts[reason] += 1
        self._groups, self._histories, self._used = {}, set(), set()


class _Writer:
    """Writes groups on a thread, those of one second in one file.

    Args:
        written: called with the name of each file.
    """

    def __init__(self, pieces: Pieces, written: Callable[[str], None]):
        self._pieces = pieces
        self._written = written
        self._condition = threading.Condition()
        self._queue: list[tuple[int, dict[str, str], dict[str, Sequence[Episode]]]] = []
        self._is_busy = False
        self._is_urgent = False
        self._is_stopped = False
        self._is_closed = False
        self._lost: UserError | None = None
        self._thread: threading.Thread | None = None

    def add(self, step: int, groups: Mapping[str, Sequence[Episode]], about: dict[str, str]) -> None:
        with self._condition:
            if self._is_stopped:
                return
            last = self._queue[-1] if self._queue else None
            if last is not None and last[0] == step and last[1] == about:
                last[2].update(groups)
            else:
                self._queue.append((step, about, dict(groups)))
            self._begin()

    def flush(self) -> None:
        """Let the thread write at once what is there."""
        with self._condition:
            self._is_urgent = bool(self._queue)
            self._condition.notify_all()

    def is_idle(self) -> bool:
        """Return whether nothing is to be written, and no error is to be raised."""
        with self._condition:
            return not (self._queue or self._is_busy or self._lost)

    def wait(self) -> None:
        """Wait until all groups are durable, or the journal has stopped.

        Raises:
            UserError: another job holds the run directory.
        """
        end = time.monotonic() + time_limits.JOURNAL_WAIT_S
        with self._condition:
            while (self._queue or self._is_busy) and not self._is_stopped:
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
        self._is_closed = False

    def _begin(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
            self._thread.start()
        self._condition.notify_all()

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._queue or self._is_closed)
                self._condition.wait_for(lambda: self._is_urgent or self._is_closed, time_limits.JOURNAL_FLUSH_S)
                batches, self._queue, self._is_urgent = self._queue, [], False
                if self._is_closed and not batches:
                    return
                self._is_busy = True
            try:
                for step, about, groups in batches:
                    self._write(step, about, groups)
            finally:
                with self._condition:
                    self._is_busy = False
                    self._condition.notify_all()

    def _write(self, step: int, about: dict[str, str], groups: Mapping[str, Sequence[Episode]]) -> None:
        if self._is_stopped:
            return
        try:
            self._written(self._pieces.write(step, encode(step, groups, about)))
        except UserError as error:  # another job has taken the run
            with self._condition:
                self._lost, self._is_stopped = error, True
        except (OSError, ValueError) as error:
            with self._condition:
                self._stop(one_line(str(error)))
            if isinstance(error, OSError) and error.errno in _FULL:  # checkpoints need the room more
                self._pieces.delete(list(self._pieces.names()))

    def _stop(self, reason: str) -> None:
        self._is_stopped, self._queue = True, []
        LOG.warning(
            "rollout.journal: rollouts are not recorded any more (%s); training continues, and a kill costs the "
            "rollouts since the last checkpoint",
            reason,
        )
