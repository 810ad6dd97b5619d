"""One job to a run directory: a lock with an owner and a heartbeat."""

from __future__ import annotations

import contextlib
import fcntl
import json
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

NAME = ".lock"
_OWNER: dict[Any, Shape] = {
    "token": str,
    "host": str,
    "machine": str,
    "pid": int,
    "started": (str, NoneType),
    "since": str,
}


class RunLock:
    """Held from `acquire` to `release`, or until this process dies.

    The owner of a lock from this machine is dead if its process is gone: its lock is taken over at once. A
    lock from another machine (or another container, whose processes cannot be seen) is dead once its
    heartbeat is older than `timeout_s` by the file system's own clock.

    Args:
        timeout_s: age of a heartbeat, seconds, from which its owner counts as dead.
    """

    def __init__(self, run_dir: str, timeout_s: float):
        self.path = os.path.join(run_dir, NAME)
        self.timeout_s = timeout_s
        self._token = secrets.token_hex(8)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self, wait: bool = False) -> str | None:
        """Take the lock; returns a line about the dead owner it was taken from, if there was one.

        Args:
            wait: until another job that runs here has ended.

        Raises:
            UserError: another job runs in this directory.
        """
        taken_from = None
        deadline = time.monotonic() + self.timeout_s + 5
        while True:
            try:
                with self._guarded():
                    owner = self._read()
                    if owner is None or (death := self._dead(owner)) is not None:
                        if owner is not None:
                            taken_from = f"took over the run directory from {_who(owner)}: {death}"
                        self._write()
                        break
            except FileNotFoundError:  # the last owner is removing the directory
                continue
            except OSError as error:
                raise UserError(
                    f"{self.path}: the lock of the run directory cannot be taken ({error.strerror or error}); remove "
                    "what is there, or choose another trainer.run_name"
                ) from error
            overdue = not _same_place(owner) and self._age() > self.timeout_s / 2 and time.monotonic() < deadline
            if not (wait or overdue):
                raise UserError(
                    f"{os.path.dirname(self.path)}: in use by {_who(owner)}, whose last sign of life is "
                    f"{self._age():.0f} s old; choose another trainer.run_name, or end that job"
                )
            time.sleep(0.2)  # its next heartbeat is overdue: either it comes, or the owner is dead
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()
        return taken_from

    def check(self) -> None:
        """Nothing, while the lock is ours.

        Raises:
            UserError: another job has taken it (this process stood still for longer than the timeout).
        """
        owner = self._read()
        if owner is None or owner.get("token") != self._token:
            who = _who(owner) if owner else "nobody: the lock file is gone"
            raise UserError(f"{os.path.dirname(self.path)}: this job lost the run directory to {who}; it stops "
                            "without writing more")  # fmt: skip

    def release(self) -> None:
        """Give the lock back, if it is ours."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        with contextlib.suppress(OSError):
            owner = self._read()
            if owner is not None and owner.get("token") == self._token:
                os.remove(self.path)

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    # ---------------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        while not self._stop.wait(self.timeout_s / 6):
            with contextlib.suppress(OSError):  # a busy file system: the next beat may do
                owner = self._read()
                if owner is None or owner.get("token") != self._token:
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

    def _dead(self, owner: dict[str, Any]) -> str | None:
        if _same_place(owner):
            pid = owner["pid"]
            return None if _started(pid) == owner["started"] else f"its process {pid} is gone"
        age = self._age()
        return f"its last sign of life is {age:.0f} s old" if age > self.timeout_s else None

    def _age(self) -> float:
        """Seconds since the last heartbeat, both ends told by the clock of the file system."""
        probe = f"{self.path}.{self._token}"
        try:
            with open(probe, "w"):
                pass
            now = os.stat(probe).st_mtime
            return max(0.0, now - os.stat(self.path).st_mtime)
        except FileNotFoundError:
            return 0.0
        finally:
            with contextlib.suppress(OSError):
                os.remove(probe)

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Two that find the same dead owner must not both take its place."""
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        with open(f"{self.path}.guard", "w") as guard:
            with contextlib.suppress(OSError):  # a file system without locks of its own: the window is small
                fcntl.flock(guard, fcntl.LOCK_EX)
            yield


def _same_place(owner: dict[str, Any]) -> bool:
    return owner.get("machine") == _machine()


def _machine() -> str:
    """This boot of this machine and this view of its processes."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{socket.gethostname()} (unknown)"


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
