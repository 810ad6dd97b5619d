"""One job at a time, and of one run its newest start."""

from __future__ import annotations

import pytest

from tests.support.inference import job
from trainer.inference.leases import Leases, RefusedError


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def leases() -> tuple[Leases, Clock]:
    clock = Clock()
    return Leases(10.0, clock), clock


def test_another_job_waits_until_the_first_has_left_or_shows_no_life():
    book, clock = leases()
    first, second = job("a", owner="1"), job("b", owner="2")
    assert book.take(first) and not book.take(first)
    with pytest.raises(RefusedError, match="in use by run a 1; choose another server, or end that job and wait 10 s"):
        book.take(second)
    clock.now = 9.0
    book.renew("1")
    clock.now = 18.0
    with pytest.raises(RefusedError):
        book.take(second)
    clock.now = 19.0
    assert book.take(second)
    with pytest.raises(RefusedError, match="taken by run b 1: this job has lost it"):
        book.renew("1")
    book.release("1")
    assert book.job == second
    book.release("2")
    assert book.take(first)


def test_a_restarted_run_gets_its_server_and_the_start_before_it_loses_it():
    book, _ = leases()
    book.take(job("a", 1, owner="1"))
    assert book.take(job("a", 2, owner="2"))
    with pytest.raises(
        RefusedError, match=r"newer start of this run \(start 2\): this one \(start 1\) has lost its lock"
    ):
        book.take(job("a", 1, owner="1"))
    with pytest.raises(RefusedError):
        book.renew("1")


@pytest.mark.parametrize("ends", ["release", "expiry", "another job"])
def test_an_earlier_start_is_refused_for_good(ends):
    book, clock = leases()
    book.take(job("a", 2, owner="2"))
    if ends == "expiry":
        clock.now = 100.0
    else:
        book.release("2")
    if ends == "another job":
        book.take(job("b", 1, owner="3"))
        clock.now = 100.0
    with pytest.raises(RefusedError, match="if its directory is an older copy, start the server again"):
        book.take(job("a", 1, owner="1"))
    assert book.take(job("a", 3, owner="4"))


def test_a_server_that_was_started_again_knows_no_job():
    book, _ = leases()
    with pytest.raises(LookupError):
        book.renew("1")
