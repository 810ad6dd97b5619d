"""The lock of a place in an object store: an object that only its owner can replace."""

from __future__ import annotations

import contextlib
import errno
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from trainer.checkpoint.lock import NAME, OWNER, RunLock
from trainer.files.documents import parse_object

if TYPE_CHECKING:
    from trainer.checkpoint.object_store import ObjectFiles


class ObjectLock(RunLock):
    """A lock in an object store, with the rules of `RunLock`.

    Every write is on the condition that the object is as this process has seen it last. So of two jobs that find a dead
    owner one wins, and a heartbeat cannot overwrite a lock that another job has taken.
    """

    def __init__(self, files: ObjectFiles, timeout_s: float, name: str, remedy: str):
        super().__init__(files.path, timeout_s, name, remedy)
        self.path = f"{files.path}/{NAME}"
        self._bucket = files.bucket
        self._place = files.place(NAME)
        self._seen: str | None = None
        """The tag of the lock at the last `_look`."""
        self._beats = 0

    def _prepare(self) -> None:
        pass

    def _make(self) -> None:
        pass

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        yield

    def _is_blocked(self) -> bool:
        return False

    def _look(self) -> tuple[dict[str, Any] | None, object]:
        owner, self._seen = self._fetch()
        return owner, self._seen

    def _read(self) -> dict[str, Any] | None:
        return self._fetch()[0]

    def _write(self) -> None:
        if not self._put(self._owner(), self._seen):
            raise FileNotFoundError(errno.ENOENT, "another job was faster", self.path)  # `acquire` looks again

    def _renew(self) -> None:
        self._replace_own(self._owner())

    def _remove(self) -> None:
        # Not deleted: not every store knows a delete on a condition, and without one it could hit another's lock.
        self._replace_own({**self._owner(), "token": ""})

    def _replace_own(self, content: dict[str, Any]) -> None:
        owner, tag = self._fetch()
        if owner is not None and owner.get("token") == self._token:
            self._put(content, tag)

    def _fetch(self) -> tuple[dict[str, Any] | None, str | None]:
        """Return the owner (None: the lock is free), and the tag of the object (None: there is none)."""
        try:
            data, tag = self._bucket.read_tagged(self._place)
        except FileNotFoundError:
            return None, None
        try:
            owner = parse_object(data, OWNER)
        except ValueError:
            return {}, tag  # unreadable: treat the object as a foreign lock, which expires by age
        return (owner if owner["token"] else None), tag

    def _put(self, content: dict[str, Any], tag: str | None) -> bool:
        self._beats += 1
        data = json.dumps({**content, "beats": self._beats}).encode()
        return self._bucket.create(self._place, data) if tag is None else self._bucket.replace(self._place, data, tag)
