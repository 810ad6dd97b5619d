"""Which job uses an inference server: one at a time, and of one run only its newest start. Uses no clock."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from trainer.generation.server_protocol import Job, owners_of

_REMEMBERED = 1000
"""Runs whose newest start is remembered, and processes and jobs that have left."""


class RefusedError(Exception):
    """The job may not use the server. The text is what the server does, without a subject."""


class InUseError(Exception):
    """The job has to wait for the server. The text says for what."""


class Leases:
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
        self._newest: OrderedDict[str, Job] = OrderedDict()  # by run; the run that came last is at the end
        self._gone: OrderedDict[str, None] = OrderedDict()
        """Owners that have left, or whose place another process of their job has taken. The owner of a job stands for
        all its processes."""

    def take(self, job: Job) -> bool:
        """Give the server to a process of `job`; returns whether another process had it, or none.

        Raises:
            RefusedError: another job uses it, or a later start of the same run has taken it.
            InUseError: a copy of the run uses it. It may be dead, so the job may wait until the lease has ended.
            LookupError: the process or its job has left, or another process of the job has taken its place.
        """
        newest = self._newest.get(job.run, job)
        if job.start in newest.starts[:-1]:  # also when the later start has left the server
            raise RefusedError(
                f"has been taken by a newer start of this run (start {len(newest.starts)}): this one (start "
                f"{len(job.starts)}) has lost its lock"
            )
        if self._is_gone(job.owner):
            raise LookupError("this process of the job has lost it")
        if self.job is not None and self.job.owner != job.owner:
            self._check_end_of(self.job, job)
            if self.job.start == job.start:
                self._gone[self.job.owner] = None
        is_new = self.job is None or self.job.owner != job.owner
        self.job, self._seen, self._newest[job.run] = job, self._now(), job
        self._newest.move_to_end(job.run)
        self._forget_oldest()
        return is_new

    def _is_gone(self, owner: str) -> bool:
        return any(one in self._gone for one in owners_of(owner))

    def _forget_oldest(self) -> None:
        for remembered in (self._newest, self._gone):
            if len(remembered) > _REMEMBERED:
                remembered.popitem(last=False)

    def _check_end_of(self, owner: Job, job: Job) -> None:
        """Check that `job` may take the server from `owner`."""
        left_s = self._seen + self.lease_s - self._now()
        if owner.start == job.start and owner.engine != job.engine:
            raise RefusedError("is in rollout.urls twice, under two names")
        if left_s <= 0 or job.continues(owner):
            return
        if owner.run != job.run:
            raise RefusedError(
                f"is in use by {owner.name}; choose another server, or end that job and wait {left_s:.0f} s"
            )
        raise InUseError(f"is in use by {owner.name}, another copy of this run, until that has ended")

    def extend(self, seconds: float) -> None:
        """Let the lease last longer: the server itself has not been able to hear from the job for that time."""
        self._seen += seconds

    def renew(self, owner: str) -> None:
        """Note that the job with this secret lives.

        Raises:
            RefusedError: another job has taken the server.
            LookupError: the server does not know the job: it has been started since; or another process of the job has
                taken the place of this one.
        """
        if self.job is None:
            raise LookupError("the server has been started again, or the job has left it")
        if self._is_gone(owner):
            raise LookupError("another process of this job uses it")
        if self.job.owner != owner:
            raise RefusedError(f"has been taken by {self.job.name}: this job has lost it")
        self._seen = self._now()

    def release(self, owner: str) -> None:
        """Leave the server, if the process or the job with this secret uses it. It cannot take the server again."""
        if not owner:
            return
        self._gone[owner] = None
        self._forget_oldest()
        if self.job is not None and owner in owners_of(self.job.owner):
            self.job = None
