"""One job to a directory: a lock with an owner and a heartbeat."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from types import NoneType
from typing import Any

from trainer.documents import Shape, parse_object
from trainer.durable import read_file, write_file
from trainer.errors import UserError

LOG = logging.getLogger(__name__)

NAME = ".lock"
_OWNER: dict[Any, Shape] = {
    "token": str,
    "host": str,
    "machine": str,
    "pid": int,
    "started": (str, NoneType),
    "since": str,
}
_GUARD_TRIES = 10


class RunLock:
    """Held from `acquire` to `release`, or until this process dies.

    The owner of a lock from this machine is dead if its process is gone: its lock is taken over at once. A
    lock from another machine (or another container, whose processes cannot be seen) is dead once its
    heartbeat has not moved for `timeout_s` while this process watched it. Clocks are never compared.

    Args:
        directory: what is locked; made if missing.
        timeout_s: seconds without a heartbeat after which an owner counts as dead.
        name: what messages call the directory.
        remedy: what the user can do when another job holds the lock.
    """

    def __init__(
        self,
        directory: str,
        timeout_s: float,
        name: str = "run directory",
        remedy: str = "choose another trainer.run_name, or end that job",
    ):
        self.directory = directory
        self.path = os.path.join(directory, NAME)
        self.timeout_s = timeout_s
        self._name = name
        self._remedy = remedy
        self._token = secrets.token_hex(8)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self, wait: bool = False) -> str | None:
        """Take the lock; returns a line about the dead owner it was taken from, if there was one.

        Watches an owner on another machine until its heartbeat moves (it is alive) or `timeout_s` have passed.

        Args:
            wait: until another job that runs here has ended.

        Raises:
            UserError: another job runs in this directory.
        """
        taken_from = None
        watch = _Watch()
        os.makedirs(os.path.dirname(os.path.abspath(self.directory)), exist_ok=True)
        while True:
            try:
                self._make()
                with self._guarded():
                    owner = self._read()
                    beat = None if owner is None else (owner.get("token"), os.stat(self.path).st_mtime_ns)
                    silent_s = watch.silent_for(beat)
                    if owner is None or (death := self._dead(owner, silent_s)) is not None:
                        if owner is not None:
                            taken_from = f"took over the {self._name} from {_who(owner)}: {death}"
                        self._write()
                        break
            except FileNotFoundError:  # the last owner is removing the directory
                continue
            except OSError as error:
                if not (_is_odd(self.path) or _is_odd(f"{self.path}.guard")):
                    raise
                raise UserError(
                    f"{self.path}: the lock cannot be taken ({error.strerror or error}); remove what is there, or "
                    f"{self._remedy}"
                ) from error
            if (_same_place(owner) or watch.moved) and not wait:
                raise UserError(f"{self.directory}: in use by {_who(owner)}; {self._remedy}")
            if silent_s == 0 and not _same_place(owner) and not watch.moved:
                seconds = f"{self.timeout_s:g} s"
                LOG.warning("%s: locked by %s; waiting %s for a heartbeat", self.directory, _who(owner), seconds)
            time.sleep(min(0.2, self.timeout_s / 20))
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()
        return taken_from

    def check(self) -> None:
        """Nothing, while the lock is ours.

        Raises:
            UserError: another job has taken it (this process stood still for longer than the timeout), or the
                directory is no longer there.
        """
        try:
            owner = self._read()
        except OSError as error:
            raise UserError(f"{self.path}: this job's lock cannot be read ({error.strerror})") from error
        if owner is None:
            raise UserError(
                f"{self.directory}: this job lost the {self._name}: its lock file is gone (was the directory "
                "removed or unmounted?); nothing more is written there"
            )
        if owner.get("token") != self._token:
            raise UserError(
                f"{self.directory}: this job lost the {self._name} to {_who(owner)}; nothing more is written there"
            )

    def release(self) -> None:
        """Give the lock back, if it is ours."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        with contextlib.suppress(OSError):  # the directory is gone, and the lock with it
            if (self._read() or {}).get("token") != self._token:
                return
            with self._guarded():
                if (self._read() or {}).get("token") == self._token:
                    os.remove(self.path)
                    os.remove(f"{self.path}.guard")

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    # ---------------------------------------------------------------------------------------------------

    def _make(self) -> None:
        # Not with makedirs: it fails when the last owner removes the directory at the same moment.
        if os.path.islink(self.directory) and not os.path.exists(self.directory):
            raise FileExistsError(errno.EEXIST, "a link to what is not there", self.directory)
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.directory)

    def _beat(self) -> None:
        while not self._stop.wait(self.timeout_s / 6):
            with contextlib.suppress(OSError):  # a busy or absent file system: the next beat may do
                owner = self._read()
                if owner is not None and owner.get("token") != self._token:
                    return  # `check` says so to whoever is about to write
                os.utime(self.path)

    def _write(self) -> None:
        write_file(self.path, json.dumps({
            "token": self._token, "host": socket.gethostname(), "machine": _machine(), "pid": os.getpid(),
            "started": _started(os.getpid()), "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        }))  # fmt: skip

    def _read(self) -> dict[str, Any] | None:
        try:
            return parse_object(read_file(self.path), _OWNER)
        except FileNotFoundError:
            return None
        except ValueError:
            return {}  # not ours, and nobody's: it dies of old age

    def _dead(self, owner: dict[str, Any], silent_s: float) -> str | None:
        if _same_place(owner):
            pid = owner["pid"]
            return None if _started(pid) == owner["started"] else f"its process {pid} is gone"
        return f"no heartbeat for {self.timeout_s:g} s" if silent_s >= self.timeout_s else None

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Two that find the same dead owner must not both take its place."""
        path = f"{self.path}.guard"
        for attempt in range(_GUARD_TRIES):
            with open(path, "w") as guard:
                with contextlib.suppress(OSError):  # a file system without locks of its own: the window is small
                    fcntl.flock(guard, fcntl.LOCK_EX)
                # The owner before may have removed the file that this process waited for. Not every file system
                # has stable inode numbers, so the tries are bounded.
                current = os.path.samestat(os.fstat(guard.fileno()), os.stat(path))
                if current or attempt == _GUARD_TRIES - 1:
                    yield
                    return


class _Watch:
    """Judges a heartbeat by its movement, as this process sees it."""

    def __init__(self) -> None:
        self.moved = False
        self._last: object = None
        self._since = time.monotonic()

    def silent_for(self, beat: object) -> float:
        """Seconds since the heartbeat was last seen to move; 0 when it is seen for the first time."""
        now = time.monotonic()
        if beat != self._last:
            self.moved = self._last is not None
            self._last, self._since = beat, now
        return now - self._since


def _is_odd(path: str) -> bool:
    """Something is there that no job has made: a directory, a link, a pipe."""
    return os.path.lexists(path) and (os.path.islink(path) or not os.path.isfile(path))


def _same_place(owner: dict[str, Any]) -> bool:
    return owner.get("machine") == _machine()


def _machine() -> str:
    """This boot of this machine, this view of its processes, and this view of when they started."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            view = " ".join(os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "time") if _has_namespace(kind))
            return f"{file.read().strip()} {view}"
    except OSError:
        return f"{socket.gethostname()} (unknown)"


def _has_namespace(kind: str) -> bool:
    return os.path.lexists(f"/proc/self/ns/{kind}")  # that of time is not in every kernel


def _started(pid: int) -> str | None:
    """When a process of this machine started (so that a recycled id is not taken for it); None: it is gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def _who(owner: dict[str, Any]) -> str:
    if not owner:
        return "an unknown process (the lock file is damaged)"
    return f"process {owner.get('pid')} on {owner.get('host')} (since {owner.get('since')})"
