"""The files of the journal: in the store of the checkpoints, if that is no disk, else in the run directory."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import time
from collections.abc import Callable

from trainer.checkpoint.storage import JOURNAL, Storage, for_each, open_storage, records_in, remove_records
from trainer.errors import one_line
from trainer.files.atomic_io import digest_bytes, read_file, sync_path

LOG = logging.getLogger(__name__)

_STAGED = ".tmp"  # the end of a file that a killed process has not completed


class RecordFiles:
    """Files that are written once and never changed: `step_N-<number>-<xxh3-128 of the content>.arrow` or `.turns`.

    A newer file has a higher number: one more than the highest that is there, or the time in nanoseconds if that is
    higher. Files of a store are brought to the disk at a start, to be read.

    Args:
        run_dir: holds the directory of the journal.
        store: of the checkpoints, if that is no disk: the files are there.
        fence: raises if this process no longer holds the run directory, or the store.
    """

    def __init__(self, run_dir: str, store: Storage | None, fence: Callable[[], None]):
        self.directory = os.path.join(run_dir, JOURNAL)
        self.is_on_disk = store is None  # whether they take the disk of the run directory
        self._storage = store or open_storage(run_dir)
        self._fence = fence
        self._newest = 0
        self._is_durable = not self.is_on_disk  # the name of the directory

    def names(self) -> dict[str, int]:
        """Return the steps of the files, by name; the oldest file comes first."""
        return records_in(self._storage.names(JOURNAL))

    def write(self, step: int, data: bytes, suffix: str = ".arrow") -> None:
        """Write a durable file.

        Raises:
            OSError: it cannot be written.
            UserError: another job holds the run.
        """
        self._newest = max(self._newest + 1, time.time_ns())
        self._fence()
        self._storage.put(f"{JOURNAL}/step_{step}-{self._newest}-{digest_bytes(data)}{suffix}", data)
        if not self._is_durable:
            sync_path(self._storage.root)
            self._is_durable = True

    def open(self, is_wanted: Callable[[int], bool]) -> dict[str, int]:
        """Return the steps of the files of the steps that are wanted, by name, to be read. No thread may be writing."""
        try:
            for name in self._storage.names(JOURNAL) if self.is_on_disk else ():
                if name.endswith(_STAGED):
                    self._fence()
                    self._storage.delete(f"{JOURNAL}/{name}")
            names = self.names()
            self._newest = max([self._newest, *(int(name.split("-")[1]) for name in names)])
            wanted = {name: step for name, step in names.items() if is_wanted(step)}
            self.forget()
            if not self.is_on_disk:
                for_each(self._bring, wanted)
        except OSError as error:
            LOG.warning(
                "rollout.journal: the records in %s are not used (%s)", self._storage.root, one_line(str(error))
            )
            self.forget()
            return {}
        return wanted

    def _bring(self, name: str) -> None:
        data = self._storage.get(f"{JOURNAL}/{name}")
        os.makedirs(self.directory, exist_ok=True)
        with open(os.path.join(self.directory, name), "wb") as file:
            file.write(data)

    def forget(self) -> None:
        """Delete what was brought from a store: nothing more is read."""
        if not self.is_on_disk:
            shutil.rmtree(self.directory, ignore_errors=True)

    def read(self, name: str) -> bytes:
        """Return the content of a file.

        Raises:
            ValueError: the file is damaged.
            OSError: it cannot be read.
        """
        data = read_file(os.path.join(self.directory, name))
        if not os.path.splitext(name)[0].endswith(f"-{digest_bytes(data)}"):
            raise ValueError("its content does not agree with its name")
        return data

    def delete(self, is_unwanted: Callable[[int], bool]) -> None:
        """Delete the files of some steps.

        Raises:
            OSError: the storage fails.
            UserError: another job holds the run.
        """
        if any(is_unwanted(step) for step in self.names().values()):
            self._fence()
            remove_records(self._storage, is_unwanted)


def is_full(error: Exception) -> bool:
    """Return whether an error says that the disk or a quota is full: checkpoints need the room more than records."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
