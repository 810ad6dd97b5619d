"""Which job uses an inference server: one at a time. Uses no clock of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from trainer.generation.server_protocol import Job, owners_of


class RefusedError(Exception):
    """The job may not use the server. The text is what the server does, without a subject."""


class InUseError(RefusedError):
    """Another job has the server, for `left_s` seconds more if it gives no sign of life."""

    def __init__(self, user: str, left_s: float):
        super().__init__(f"is in use by {user}; choose another server, or end that job and wait {left_s:.0f} s")
        self.left_s = left_s


class Lease:
    """The job that uses the server.

    Args:
        lease_s: seconds without a sign of life after which another job may take the server.
        now: returns seconds of a monotonic clock.
    """

    def __init__(self, lease_s: float, now: Callable[[], float]):
        self.lease_s = lease_s
        self._now = now
        self.job: Job | None = None
        """The job that has taken the server last, unless it has left it."""
        self._seen = 0.0
        self._gone: deque[str] = deque(maxlen=1000)
        """Owners that have left, or that another process of their job has replaced. The owner of a job stands for all
        its processes."""

    def take(self, job: Job) -> bool:
        """Give the server to a process of `job`; return whether another process had it, or none.

        Raises:
            InUseError: another job uses it.
            RefusedError: a later start of the same run does.
            LookupError: the process or its job has left, or another process of the job has taken its place.
        """
        if self._has_left(job.owner):
            raise LookupError("this process of the job has lost it")
        user = self.job
        if user is not None and user.owner != job.owner:
            self._check_end_of(user, job)
            self._gone.append(user.owner)
        self.job, self._seen = job, self._now()
        return user is None or user.owner != job.owner

    def _check_end_of(self, user: Job, job: Job) -> None:
        """Check that `job` may take the server from `user`."""
        left_s = self._seen + self.lease_s - self._now()
        if user.run != job.run:
            if left_s > 0:
                raise InUseError(user.name, left_s)
        elif user.start > job.start:
            raise RefusedError(f"has been taken by a newer start of this run (start {user.start})")
        elif user.start == job.start and user.engine != job.engine:
            raise RefusedError("is in rollout.urls twice, under two names")

    def _has_left(self, owner: str) -> bool:
        return any(one in self._gone for one in owners_of(owner))

    def renew(self, owner: str) -> None:
        """Note that the job with this secret lives.

        Raises:
            RefusedError: another job has taken the server.
            LookupError: the server does not know the job: it has been started since; or another process of the job has
                taken the place of this one.
        """
        if self.job is None:
            raise LookupError("the server has been started again, or the job has left it")
        if self.job.owner != owner:
            if owners_of(owner)[1] == owners_of(self.job.owner)[1]:
                raise LookupError("another process of this job uses it")
            raise RefusedError(f"has been taken by {self.job.name}: this job has lost it")
        self._seen = self._now()

    def release(self, owner: str) -> None:
        """Leave the server, if the process or the job with this secret uses it. It cannot take the server again."""
        if not owner:
            return
        self._gone.append(owner)
        if self.job is not None and owner in owners_of(self.job.owner):
            self.job = None


def find_difference(served: Mapping[str, Any], wanted: Mapping[str, Any]) -> str | None:
    """Return how the model of a job differs from the one that a server serves; None: it does not.

    Versions of transformers differ in the names that they know, so only names that both have are compared.
    """
    for name in sorted(served.keys() & wanted.keys()):
        if served[name] != wanted[name]:
            return f"serves another model: {name} is {served[name]!r} there, and {wanted[name]!r} in this job"
    return None
