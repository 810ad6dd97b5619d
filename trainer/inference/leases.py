"""Which job uses an inference server: one at a time, and of one run only its newest start. Uses no clock."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from trainer.generation.server_protocol import Job

_RUNS = 1000
"""Runs whose newest start is remembered."""


class RefusedError(Exception):
    """The job may not use the server. The text is what the server does, without a subject."""


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
        self._newest: OrderedDict[str, int] = OrderedDict()  # start by run; the run that came last is at the end

    def take(self, job: Job) -> bool:
        """Give the server to `job`; returns whether another job or start had it.

        Raises:
            RefusedError: another job uses it, or a later start of the same run has taken it.
        """
        newest = self._newest.get(job.run, job.start)
        if job.start < newest:  # also when that start has left the server
            raise _older(newest, job)
        if self.job is not None and self.job.owner != job.owner:
            left_s = self._seen + self.lease_s - self._now()
            if self.job.run == job.run and job.start == self.job.start and left_s > 0:
                raise _older(newest, job)
            if self.job.run != job.run and left_s > 0:
                raise RefusedError(
                    f"is in use by {self.job.name}; choose another server, or end that job and wait {left_s:.0f} s"
                )
        is_new = self.job is None or self.job.owner != job.owner
        self.job, self._seen, self._newest[job.run] = job, self._now(), job.start
        self._newest.move_to_end(job.run)
        if len(self._newest) > _RUNS:
            self._newest.popitem(last=False)
        return is_new

    def renew(self, owner: str) -> None:
        """Note that the job with this secret lives.

        Raises:
            RefusedError: another job has taken the server.
            LookupError: the server does not know the job: it has been started since.
        """
        if self.job is None:
            raise LookupError("the server has been started again, or the job has left it")
        if self.job.owner != owner:
            raise RefusedError(f"has been taken by {self.job.name}: this job has lost it")
        self._seen = self._now()

    def release(self, owner: str) -> None:
        """Leave the server, if the job with this secret uses it."""
        if self.job is not None and self.job.owner == owner:
            self.job = None


def _older(newest: int, job: Job) -> RefusedError:
    return RefusedError(
        f"has been taken by a newer start of this run (start {newest}): this one (start {job.start}) has lost its "
        "lock; if its directory is an older copy, start the server again"
    )
