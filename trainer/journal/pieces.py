"""The files of the journal: on the disk of the run, and copies in an object store if the checkpoints are there."""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial

from trainer.checkpoint.storage import (
    JOURNAL,
    RECORDS,
    Age,
    Storage,
    age_of_records,
    for_each,
    open_storage,
    order_of_records,
    records_in,
    remove_records,
    step_of_records,
)
from trainer.errors import UserError, describe_error, one_line
from trainer.files.atomic_io import digest_bytes, read_file, sync_path, write_file
from trainer.process import time_limits

LOG = logging.getLogger(__name__)

_PARALLEL = 8
_STAGED = ".tmp"
"""The end of a file that `write_file` has not completed."""
_FETCHED = ".fetched"
"""The end of a file of the store that is not yet marked as one."""
EFFECT_OF_DAMAGE = "its groups are generated again"
"""What follows if a file is damaged, for messages."""
_ABANDONED = "abandoned_after"
"""The file with the step to which the run went back while the store failed."""


class Pieces:
    """Files that are written once and never changed: `step_N-<number>-<xxh3-128 of the content>` and an end.

    A newer file has a higher number, on whichever machine it was written: one more than the highest that the machine
    knows, or the time in nanoseconds if that is higher. So the time alone decides only where the store failed, and a
    machine does not know the files of the one before it.

    Args:
        run_dir: holds the directory of the journal.
        fence: raises if this process no longer holds the run directory.
    """

    def __init__(self, run_dir: str, fence: Callable[[], None]):
        self.directory = os.path.join(run_dir, JOURNAL)
        self._disk = open_storage(run_dir)
        self._fence = fence
        self._numbering = threading.Lock()
        self._newest = 0
        self._is_durable = False  # the directory

    def names(self) -> dict[str, int]:
        """Return the steps of the files, by name."""
        return records_in(self._disk)

    def write(self, step: int, data: bytes) -> str:
        """Write a durable file; return its name.

        Raises:
            OSError: it cannot be written.
            UserError: another job holds the run directory.
        """
        with self._numbering:
            self._newest = number = max(self._newest + 1, time.time_ns())
        name = f"step_{step}-{number}-{digest_bytes(data)}{RECORDS}"
        self._write(self.path(name), data)
        return name

    def continue_after(self, names: Iterable[str]) -> None:
        """Give files that are written from now on higher numbers than these files have."""
        with self._numbering:
            self._newest = max([self._newest, *map(order_of_records, names)])

    def add_fetched(self, name: str, data: bytes) -> None:
        """Write a file of the store. It counts as older than all files that this machine has written.

        If it replaces one of these that is damaged, it keeps the age of that one.

        Raises:
            OSError: it cannot be written.
            UserError: another job holds the run directory.
        """
        staged, written_at = f"{self.path(name)}{_FETCHED}", self._written_at(name)
        self._write(staged, data)
        # Before it has its name: a kill in between must not leave it as a new file.
        os.utime(staged, ns=(written_at, written_at))
        os.replace(staged, self.path(name))

    def _write(self, path: str, data: bytes) -> None:
        if not self._is_durable or not os.path.isdir(self.directory):
            os.makedirs(self.directory, exist_ok=True)
            sync_path(os.path.dirname(self.directory) or ".")  # also of one that a killed process has just made
            self._is_durable = True
        try:
            write_file(path, data, self._fence)
        except BaseException:
            with contextlib.suppress(OSError):
                os.remove(f"{path}{_STAGED}")
            raise

    def remove_interrupted(self) -> None:
        """Delete what interrupted writes have left. No thread may be writing."""
        with contextlib.suppress(OSError):
            names = [name for name in os.listdir(self.directory) if _is_interrupted(name)]
            for name in names:
                self._fence()
                os.remove(self.path(name))

    def read(self, name: str) -> bytes:
        """Return the content of a file.

        Raises:
            ValueError: the file is damaged.
            OSError: it cannot be read.
        """
        data = read_file(self.path(name))
        if not is_intact(name, data):
            raise ValueError("its content does not agree with its name")
        return data

    def is_damaged(self, name: str) -> bool:
        """Return whether a file cannot be read, or has another content than its name says."""
        try:
            self.read(name)
        except FileNotFoundError:  # deleted since, by a commit
            return False
        except (OSError, ValueError):
            return True
        return False

    def age(self, name: str) -> Age:
        return age_of_records(name, self._written_at(name))

    def _written_at(self, name: str) -> int:
        """Return when this machine wrote a file. 0: it came from the store, or does not exist."""
        with contextlib.suppress(OSError):
            return os.stat(self.path(name)).st_mtime_ns
        return 0

    def delete(self, names: Collection[str]) -> None:
        """Delete files. One that cannot be deleted stays."""
        for name in names:
            with contextlib.suppress(OSError):
                self._fence()
                self._disk.delete(f"{JOURNAL}/{name}")

    @property
    def abandoned_after(self) -> int | None:
        """The step to which the run went back, as long as the store may have older records of later steps."""
        try:
            return int(read_file(self.path(_ABANDONED)))
        except (OSError, ValueError):
            return None

    @abandoned_after.setter
    def abandoned_after(self, step: int | None) -> None:
        with contextlib.suppress(OSError):
            if step is None:
                os.remove(self.path(_ABANDONED))
            else:
                self._write(self.path(_ABANDONED), str(step).encode())

    def path(self, name: str) -> str:
        """Return the path of a file."""
        return os.path.join(self.directory, name)


class Upkeep:
    """Deletes files, and copies them to a store. What fails costs disk space or time, no more.

    The disk and the store have a thread each: a store that is slow keeps no file on the disk longer than it is needed.
    A file that is deleted before its copy begins is not copied.

    Args:
        storage: of the checkpoints; None: they are on a disk, and nothing is copied.
        fence: raises if this process no longer holds the checkpoints.
    """

    def __init__(self, pieces: Pieces, storage: Storage | None, fence: Callable[[], None]):
        self._pieces = pieces
        self._storage = storage
        self._fence = fence
        self._on_disk, self._in_store = _Tasks("journal-upkeep"), _Tasks("journal-copies")
        self._to_copy: set[str] = set()
        """Files whose copy has begun, and waits for others or is under way."""

    def fetch(self, step: int, is_wanted: Callable[[int], bool]) -> None:
        """Bring the files of some steps to the disk, as far as it lacks them, or has damaged ones.

        Args:
            step: behind which the run continues.

        Raises:
            OSError: the disk is full.
        """
        if self._storage is None:
            return
        storage, here = self._storage, self._pieces.names()
        try:
            if (last := self._pieces.abandoned_after) is not None:
                if step > last:  # committed since, perhaps by another machine, whose records are valid
                    self._pieces.abandoned_after = None
                else:
                    self._remove_abandoned(storage, last)
            there = records_in(storage)
            self._pieces.continue_after(there)
            for name in here.keys() - there.keys():
                if is_wanted(here[name]):
                    self.copy(name)  # an earlier start has not come to it

            def bring(name: str) -> None:
                if name in here and not self._pieces.is_damaged(name):
                    return
                data = storage.get(f"{JOURNAL}/{name}")
                if not is_intact(name, data):
                    LOG.warning("rollout.journal: %s in %s is damaged; %s", name, storage.root, EFFECT_OF_DAMAGE)
                    return
                self._pieces.add_fetched(name, data)
                if name in here:
                    LOG.warning(
                        "rollout.journal: %s in %s was damaged, and is replaced by its copy in %s",
                        name,
                        self._pieces.directory,
                        storage.root,
                    )

            for_each(bring, [name for name, step in there.items() if is_wanted(step)], _PARALLEL)
        except OSError as error:
            if is_full(error):
                raise
            LOG.warning("rollout.journal: not all records in %s are used (%s)", storage.root, one_line(str(error)))

    def copy(self, name: str) -> None:
        """Begin to copy a file to the store. It is left out for a minute after the store has failed."""
        if self._storage is not None and name not in self._to_copy:
            self._to_copy.add(name)
            self._in_store.begin(partial(self._copy, self._storage, name))

    def remove_after(self, step: int) -> None:
        """Delete the files of the steps after `step`, on the disk and in the store.

        If the store fails, the next copy tries again, and so does `fetch`, which brings nothing before it has
        succeeded.
        """
        if self._storage is None:
            self._remove_here(lambda of: of > step)
            return
        before = self._pieces.abandoned_after
        # First of all: after a kill, what is in the store must not come back.
        last = self._pieces.abandoned_after = step if before is None else min(before, step)
        self._remove_here(lambda of: of > step)
        try:
            with self._in_store.held(time_limits.JOURNAL_WAIT_S):  # what is copied now would come back
                self._remove_abandoned(self._storage, last)
        except OSError as error:
            LOG.warning(
                "rollout.journal: the records of the steps after %d in %s cannot be deleted (%s); the run does not use "
                "them, and deletes them once the store answers",
                step,
                self._storage.root,
                one_line(str(error)),
            )

    def remove_until(self, oldest: Callable[[], int]) -> None:
        """Begin to delete the files of the steps up to `oldest()`, which is called on a thread."""

        def remove() -> None:
            last = oldest()
            if last > 0:
                self._remove_here(lambda step: step <= last)
                if self._storage is not None:
                    self._in_store.begin(partial(self._remove_there, lambda step: step <= last))

        self._on_disk.begin(remove)

    def wait(self, timeout_s: float) -> bool:
        """Wait until all that has begun is done; return whether it is."""
        end = time.monotonic() + timeout_s
        # What is deleted on the disk is deleted in the store after it.
        return all([tasks.wait(end - time.monotonic()) for tasks in (self._on_disk, self._in_store)])

    def close(self) -> None:
        """End the threads. What has not begun after some seconds is dropped."""
        end = time.monotonic() + time_limits.JOURNAL_CLOSE_S
        for tasks in (self._on_disk, self._in_store):
            tasks.close(end - time.monotonic())

    def _remove_here(self, is_unwanted: Callable[[int], bool]) -> None:
        self._pieces.delete([name for name, step in self._pieces.names().items() if is_unwanted(step)])

    def _remove_there(self, is_unwanted: Callable[[int], bool]) -> None:
        if self._storage is not None:
            self._fence()
            remove_records(self._storage, is_unwanted)

    def _remove_abandoned(self, storage: Storage, last: int) -> None:
        """Delete in the store what the run has left behind when it went back, but not what it has recorded since."""
        self._fence()
        there = records_in(storage)
        here = self._pieces.names()  # after that: a file that is copied meanwhile is on the disk
        names = [name for name, step in there.items() if step > last and name not in here]
        for_each(lambda name: storage.delete(f"{JOURNAL}/{name}"), names)
        if self._pieces.abandoned_after == last:  # else the run has gone back further meanwhile
            self._pieces.abandoned_after = None

    def _copy(self, storage: Storage, name: str) -> None:
        try:
            if self._in_store.has_just_failed:
                return  # each attempt takes long, and deletions wait behind it
            try:
                data = self._pieces.read(name)
            except (FileNotFoundError, ValueError):  # it is deleted, or damaged
                return
            self._fence()
            if (last := self._pieces.abandoned_after) is not None:  # the store answers again, perhaps
                self._remove_abandoned(storage, last)
            storage.put(f"{JOURNAL}/{name}", data)
        finally:
            self._to_copy.discard(name)


class _Tasks:
    """Calls functions one after another, on a thread that begins with the first one."""

    def __init__(self, name: str):
        self._name = name
        self._waiting: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._running = threading.Lock()
        """Held while a function runs."""
        self._has_failed = False
        self._failed_at = -math.inf

    @property
    def has_just_failed(self) -> bool:
        return time.monotonic() - self._failed_at < time_limits.UPLOAD_LONGEST_BACKOFF_S

    def begin(self, task: Callable[[], object]) -> None:
        self._waiting.put(task)
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Wait until all that has begun is done; return whether it is."""
        if self._thread is None:
            return True
        done = threading.Event()
        self.begin(done.set)
        return done.wait(timeout_s)

    @contextlib.contextmanager
    def held(self, timeout_s: float) -> Iterator[None]:
        """Wait for what is under way, and let nothing else begin in the block.

        Raises:
            TimeoutError: it takes longer.
        """
        if not self._running.acquire(timeout=timeout_s):
            raise TimeoutError("it does not answer")
        try:
            yield
        finally:
            self._running.release()

    def close(self, timeout_s: float) -> None:
        """End the thread. What has not begun by then is dropped."""
        self.wait(timeout_s)
        with contextlib.suppress(queue.Empty):
            while True:
                self._waiting.get_nowait()
        if self._thread is not None:
            self._waiting.put(None)
            self._thread = None

    def _run(self) -> None:
        while (task := self._waiting.get()) is not None:
            try:
                with self._running:
                    task()
                if not self.has_just_failed:
                    self._has_failed = False
            except Exception as error:  # if the thread ended, nobody would notice
                if not self._has_failed:
                    is_known = isinstance(error, (OSError, UserError))
                    LOG.warning(
                        "rollout.journal: the records are not copied or deleted (%s); training continues",
                        one_line(str(error)) if is_known else describe_error(error),
                    )
                self._has_failed, self._failed_at = True, time.monotonic()


def _is_interrupted(name: str) -> bool:
    record = name.removesuffix(_STAGED).removesuffix(_FETCHED)
    return record != name and step_of_records(record) is not None


def is_full(error: Exception) -> bool:
    """Return whether an error says that the disk or a quota is full: checkpoints need the room more than records."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def is_intact(name: str, data: bytes) -> bool:
    """Return whether a file has the content that its name says."""
    return os.path.splitext(name)[0].endswith(f"-{digest_bytes(data)}")
