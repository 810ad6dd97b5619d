"""The journal: finished episodes, durable before a step trains on them, and found again after a kill."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from trainer.checkpoint.storage import Storage
from trainer.episodes import Episode
from trainer.errors import UserError, describe_error, one_line
from trainer.journal.files import RecordFiles
from trainer.journal.history import Identity, after, digest
from trainer.journal.replay import Replay
from trainer.journal.turns import TurnRecord
from trainer.journal.writer import Writer
from trainer.process import time_limits

LOG = logging.getLogger(__name__)


class Journal:
    """The records of one run. It writes on a thread of its own.

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
        self._thread = threading.get_ident()
        self._settings = settings
        self._timer = timer
        self._files = RecordFiles(run_dir, storage, fence)
        self._deletions: list[threading.Thread] = []
        self._tells_lack = tells_lack
        self.is_on = is_on
        """Whether records are written and used."""
        self._writer = Writer(self._files)
        self.replay = Replay(self._files, {})
        """The records that were there at the start."""
        self._step = 0  # the last one that is trained

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
        self._writer.wait()
        if not self.is_on:
            # The run trains and logs these steps in another way now. A comparison with its log must not use them.
            self._files.delete(lambda of: of > step)
            return
        self._writer.retry(is_start=True)
        names = self._files.open(lambda of: of > step or step == 0)  # the initial weights are evaluated as step 0
        self.replay = Replay(self._files, names)
        if step and not names and self._tells_lack:
            LOG.info("rollout.journal: there are no records of the steps after %d", step)

    def trained(self, episodes: Iterable[Episode]) -> None:
        """Note the episodes that the next step has trained on: the weights have another history now."""
        self._check_thread()
        self._history = after(self.history, episodes, self._settings)
        self._step += 1
        self._writer.retry()
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
        self._writer.wait()
        self._files.delete(lambda of: of > step)

    def free_space(self) -> None:
        """Stop, and delete all records: a checkpoint had no space on the disk. Any thread may call this."""
        if self.is_on and self._files.is_on_disk:
            self._writer.free_space("a checkpoint has found the disk full")

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
        self._writer.close()
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
        if self.is_on and (groups or turns):
            about = {"history": self._of(history), "config": self._settings.rollouts}
            if version is not None:
                about["version"] = str(version)
            self._writer.add(step, groups, about, turns)

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
