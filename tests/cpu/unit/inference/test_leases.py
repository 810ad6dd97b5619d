"""One job at a time, and of one run its newest start."""

from __future__ import annotations

import pytest

from tests.support.inference import copied, job
from trainer.inference.leases import InUseError, Leases, RefusedError


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
    book.take(second)
    with pytest.raises(RefusedError, match="taken by run b 1: this job has lost it"):
        book.renew("1")
    book.release("1")
    assert book.job == second
    book.release("2")
    book.take(job("a"))


def test_a_restarted_run_gets_its_server_and_the_start_before_it_loses_it():
    book, _ = leases()
    book.take(job("a", 1, owner="1"))
    book.take(job("a", 2, owner="2"))
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
    with pytest.raises(RefusedError, match="has lost its lock"):
        book.take(job("a", 1, owner="1"))
    book.take(job("a", 3, owner="4"))


@pytest.mark.parametrize("copy_is_of", ["now", "before"])
def test_a_copy_of_the_run_waits_until_the_original_has_ended(copy_is_of):
    book, clock = leases()
    book.take(job("a", 2, owner="1"))
    copy = copied(job("a", 2 if copy_is_of == "now" else 1))
    with pytest.raises(InUseError, match="in use by run a 2, another copy of this run, until that has ended"):
        book.take(copy)
    book.renew("1")
    clock.now = 10.0
    book.take(copy)
    with pytest.raises(RefusedError, match="this job has lost it"):
        book.renew("1")
    with pytest.raises(InUseError):  # the original, started again
        book.take(job("a", 3, owner="3"))
    clock.now = 20.0
    book.take(job("a", 3, owner="3"))


def test_a_directory_that_an_older_copy_has_replaced_is_taken_after_the_lease():
    book, clock = leases()
    book.take(job("a", 3, owner="1"))
    restored = copied(job("a", 1), directory=job("a").directory)
    with pytest.raises(InUseError):
        book.take(restored)
    clock.now = 10.0
    book.take(restored)
    book.renew(restored.owner)


def test_a_new_process_of_a_job_takes_the_place_of_the_old_one_for_good():
    book, _ = leases()
    book.take(job("a", owner="1"))
    book.take(job("a", owner="2"))
    with pytest.raises(LookupError, match="another process of this job uses it"):
        book.renew("1")
    with pytest.raises(LookupError, match="this process of the job has lost it"):
        book.take(job("a", owner="1"))
    book.renew("2")


def test_a_process_that_has_left_does_not_come_back():
    book, _ = leases()
    book.take(job("a", owner="1"))
    book.release("1")
    with pytest.raises(LookupError):
        book.take(job("a", owner="1"))
    book.take(job("b"))


def test_a_job_that_has_left_takes_the_server_with_none_of_its_processes():
    """The driver of a job leaves for all of them: for those that start, too, whose requests may come late."""
    book, _ = leases()
    user = job("a", owner="a")
    first, late = user.of_process(0), user.of_process(0)
    book.take(first)
    book.release("another")
    assert book.job == first
    book.release("a")
    assert book.job is None
    for process in (first, late):
        with pytest.raises(LookupError):
            book.take(process)
        with pytest.raises(LookupError):
            book.renew(process.owner)
    book.take(job("b", owner="b").of_process(0))
    assert book.job.name == "run b 1"
    early = job("c", owner="c").of_process(0)
    book.release("c")
    book.release("b")
    with pytest.raises(LookupError):
        book.take(early)
    book.release("")
    book.take(job("a", 2, owner="").of_process(0))


def test_a_server_under_two_names_is_refused():
    book, _ = leases()
    book.take(job("a", owner="1"))
    with pytest.raises(RefusedError, match="is in rollout.urls twice, under two names"):
        book.take(job("a", owner="2", engine=1))


def test_time_that_the_server_could_not_listen_does_not_end_a_lease():
    book, clock = leases()
    book.take(job("a", owner="1"))
    clock.now = 50.0
    book.extend(45.0)
    with pytest.raises(RefusedError, match="wait 5 s"):
        book.take(job("b"))


def test_a_server_that_was_started_again_knows_no_job():
    book, _ = leases()
    with pytest.raises(LookupError):
        book.renew("1")
