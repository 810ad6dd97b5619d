"""A lock on a directory or prefix, with an owner and a heartbeat. It lets one job at a time use the storage."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import threading
import time
from types import NoneType
from typing import Any

from trainer.checkpoint.storage import open_storage
from trainer.errors import UserError, describe_error
from trainer.files.documents import Shape, parse_object
from trainer.process import time_limits
from trainer.process.signal_watch import start_time
from trainer.process.signals import SIGNALS
from trainer.process.watchdog import ends_within

LOG = logging.getLogger(__name__)
_REMOVING_S = 0.01  # pause before the next try while the last owner removes the directory

NAME = ".lock"
OWNER: dict[Any, Shape] = {
    "token": str,
    "host": str,
    "machine": str,
    "pid": int,
    "started": (str, NoneType),
    "since": str,
}


class RunLock(contextlib.AbstractContextManager["RunLock"]):
    """A lock that this process holds from `acquire` to `release`, or until it dies.

    An owner on this machine is dead if its process is gone; its lock is taken over immediately. An owner on another
    machine (or in another container, whose processes are not visible) is dead if its heartbeat has not moved for
    `lease_s` while this process watched it. Clocks of different machines are never compared.

    Every write is on the condition that the lock is as this process has seen it last. So of two jobs that find a dead
    owner one wins, and no heartbeat can overwrite a lock that another job has taken.

    Args:
        directory: the directory or URL to lock. A directory is created if it is missing.
        lease_s: seconds without a heartbeat after which an owner counts as dead.
        name: the name of the directory in messages.
        remedy: the advice to the user if another job holds the lock.
        trusts_heartbeat: `check` asks nothing of the storage, which may be out of service. It returns what the last
            heartbeat has seen.
    """

    def __init__(
        self,
        directory: str,
        lease_s: float,
        name: str = "run directory",
        remedy: str = "choose another trainer.run_name, or end that job",
        trusts_heartbeat: bool = False,
    ):
        self._storage = open_storage(directory)
        self.directory = directory
        self.path = f"{directory}/{NAME}"
        self.lease_s = lease_s
        self._name = name
        self._remedy = remedy
        self._token = secrets.token_hex(8)
        self._beats = 0
        self._trusts_heartbeat = trusts_heartbeat
        self._lost_to: dict[str, Any] | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self, wait: bool = False) -> str | None:
        """Take the lock; returns a line about the dead owner if the lock was taken over.

        Watch an owner on another machine until its heartbeat moves (it is alive) or `lease_s` have passed.

        Args:
            wait: if another job runs here, wait for its end.

        Raises:
            UserError: another job runs in this directory.
        """
        taken_from = waits_for = last = None
        since, has_moved = time.monotonic(), False
        self._make_parent()
        while True:
            try:
                self._storage.make()
                owner, etag = self._fetch()
                now, beat = time.monotonic(), None if owner is None else etag
                if beat != last:
                    has_moved, last, since = last is not None, beat, now
                silent_s = now - since
                if owner is None or (death := self._dead(owner, silent_s)) is not None:
                    if not self._put(self._owner(), etag):
                        continue  # another job was faster
                    if owner is not None:
                        taken_from = f"took over the {self._name} from {_describe(owner)}: {death}"
                    break
            except FileNotFoundError:  # the last owner is removing the directory
                self._make_parent()
                SIGNALS.check()
                time.sleep(_REMOVING_S)
                continue
            is_alive = _is_local(owner) or has_moved
            if is_alive and not wait:
                raise UserError(f"{self.directory}: in use by {_describe(owner)}; {self._remedy}")
            if is_alive and waits_for != owner.get("token"):
                waits_for = owner.get("token")
                LOG.warning("%s: in use by %s; waiting for the end of that job", self.directory, _describe(owner))
            if silent_s == 0 and not is_alive:
                seconds = f"{self.lease_s:g} s"
                LOG.warning("%s: locked by %s; waiting %s for a heartbeat", self.directory, _describe(owner), seconds)
            time.sleep(min(0.2, self.lease_s / 20))
            SIGNALS.check()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        with SIGNALS.blocked():
            self._thread.start()
        return taken_from

    def _make_parent(self) -> None:
        if self._storage.disk is not None:
            os.makedirs(os.path.dirname(self._storage.root), exist_ok=True)

    def check(self, now: bool = False) -> None:
        """Check that this process still holds the lock.

        Args:
            now: look at the lock itself, whatever the last heartbeat has seen.

        Raises:
            UserError: another job has taken the lock (this process was suspended for longer than the lease), or the
                directory is gone.
        """
        if now or not self._trusts_heartbeat:
            try:
                owner = self._fetch()[0]
            except UserError:
                raise  # an object store that does not answer: an `OSError`, too, and the save can be tried again
            except OSError as error:
                raise UserError(f"{self.path}: this job's lock cannot be read ({error.strerror})") from error
            if owner is None:
                raise UserError(
                    f"{self.directory}: this job lost the {self._name}: its lock file is gone (was the directory "
                    "removed or unmounted?); nothing more is written there"
                )
            self._lost_to = owner if owner.get("token") != self._token else None
        if self._lost_to is not None:
            raise UserError(
                f"{self.directory}: this job lost the {self._name} to {_describe(self._lost_to)}; nothing more is "
                "written there"
            )

    def release(self) -> None:
        """Release the lock if this process holds it. If that fails, say so: how the job ends matters more."""
        self._stop.set()
        try:
            if ends_within(self._release, time_limits.LOCK_RELEASE_S):
                return
            reason = f"the storage has not answered for {time_limits.LOCK_RELEASE_S:g} s"
        except Exception as error:
            reason = describe_error(error)
        LOG.warning(
            "%s: the %s is still locked by this job (%s); another job can take it when this process has ended, on "
            "another machine %g s after that",
            self.path,
            self._name,
            reason,
            self.lease_s,
        )

    def _release(self) -> None:
        if self._thread is not None:
            self._thread.join()  # the heartbeat may hang
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # the directory is gone, and the lock with it
            owner, etag = self._fetch()
            if etag is None or owner is None or owner.get("token") != self._token:
                return
            # An object is not deleted: without a condition, that could hit the lock of another job.
            if not self._storage.delete_if_match(NAME, etag):
                self._put({**self._owner(), "token": ""}, etag)

    def __exit__(self, *_: object) -> None:
        self.release()

    def _beat(self) -> None:
        while not self._stop.wait(self.lease_s / 6):
            with contextlib.suppress(OSError):  # a busy or absent file system: the next beat may succeed
                self._renew()
                if self._lost_to is not None:  # the next check raises
                    return

    def _owner(self) -> dict[str, Any]:
        """Return what this process writes into the lock."""
        return {
            "token": self._token,
            "host": socket.gethostname(),
            "machine": machine_name(),
            "pid": os.getpid(),
            "started": start_time(os.getpid()),
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        }

    def _renew(self) -> None:
        """Show that this owner lives, unless another job has taken the lock."""
        owner, etag = self._fetch()
        if owner is not None and owner.get("token") != self._token:
            self._lost_to = owner
        elif owner is not None and etag is not None:
            if self._storage.disk is not None:  # which may be busy for longer than `lease_s`
                self._storage.disk.touch_if_match(NAME, etag)
            else:
                self._put(self._owner(), etag)

    def _fetch(self) -> tuple[dict[str, Any] | None, str | None]:
        """Return the owner (None: the lock is free), and the etag of the lock (None: there is none)."""
        try:
            data, etag = self._storage.get_with_etag(NAME)
        except FileNotFoundError:
            return None, None
        try:
            owner = parse_object(data, OWNER)
        except ValueError:
            return {}, etag  # unreadable: treat it as a foreign lock, which expires by age
        return (owner if owner["token"] else None), etag

    def _put(self, content: dict[str, Any], etag: str | None) -> bool:
        self._beats += 1  # every heartbeat changes the content, and with it the etag
        data = json.dumps({**content, "beats": self._beats}).encode()
        return self._storage.put_if(NAME, data, etag)

    def _dead(self, owner: dict[str, Any], silent_s: float) -> str | None:
        """Return why the owner is dead; None: it may be alive."""
        if _is_local(owner):
            pid = owner["pid"]
            return None if start_time(pid) == owner["started"] else f"its process {pid} is gone"
        return f"no heartbeat for {self.lease_s:g} s" if silent_s >= self.lease_s else None


def holder(directory: str) -> tuple[str | None, str | None]:
    """Return the process that holds the lock of `directory`, and the dead process that has left it; None: neither.

    A process on another machine counts as alive if its heartbeat is younger than twice
    `LOCK_LEASE_S` by the clock of this machine. If that clock is wrong, so may be the answer; no job relies on
    it. Changes nothing.
    """
    lock = RunLock(directory, 2 * time_limits.LOCK_LEASE_S)
    try:
        owner = lock._fetch()[0]
        if owner is None:
            return None, None
        age_s = time.time() - os.stat(lock.path).st_mtime
    except OSError:
        return None, None
    dead = lock._dead(owner, age_s)
    return (_describe(owner), None) if dead is None else (None, _describe(owner))


def _is_local(owner: dict[str, Any]) -> bool:
    """Return whether this process can see the processes of the owner's machine."""
    return owner.get("machine") == machine_name()


def machine_name() -> str:
    """Return a name of this boot of this machine, of its process ids and of its process start times."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            kinds = [f"/proc/self/ns/{kind}" for kind in ("pid", "time")]  # not every kernel has time namespaces
            return " ".join([file.read().strip(), *(os.readlink(kind) for kind in kinds if os.path.lexists(kind))])
    except OSError:
        return f"{socket.gethostname()} (unknown)"


def _describe(owner: dict[str, Any]) -> str:
    if not owner:
        return "an unknown process (the lock file is damaged)"
    return f"process {owner.get('pid')} on {owner.get('host')} (since {owner.get('since')})"
