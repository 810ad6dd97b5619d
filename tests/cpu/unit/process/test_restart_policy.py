"""When the ranks start again, and when the run ends."""

from __future__ import annotations

import pytest

from trainer.errors import FailureSource, NonFiniteError, NonRetryableError, UserError, WorkerError, set_failure_source
from trainer.process.restart_policy import Restarts, can_recover


def from_rank(error: Exception, name: str = "rank 0") -> Exception:
    set_failure_source(error, FailureSource(name))
    return error


def killed() -> Exception:
    return from_rank(WorkerError("rank 0 died", cause="killed"))


def test_restarts_are_limited_within_the_window_and_delayed_exponentially():
    restarts = Restarts(3, 60)
    assert [restarts.decide(killed(), 1, now).delay_s for now in (0, 10, 20)] == [0, 2, 4]
    decision = restarts.decide(killed(), 1, 30)
    assert decision.refusal and not decision.repeated
    assert restarts.decide(killed(), 1, 61).delay_s == 4, "the first has left the window"
    assert restarts.decide(killed(), 1, 200).delay_s == 0, "all have left it"
    assert restarts.count == 5


def test_no_delay_is_longer_than_five_minutes():
    restarts = Restarts(50, 1e9)
    assert max(restarts.decide(killed(), 1, now).delay_s for now in range(50)) == 300


@pytest.mark.parametrize(
    "fault", [lambda: WorkerError("", cause="memory"), lambda: ValueError("a bug"), lambda: NonFiniteError("nan")]
)
def test_a_job_failure_at_the_same_step_is_not_retried_twice(fault):
    restarts = Restarts(9, 60)
    assert not restarts.decide(from_rank(fault()), 4, 0).refusal
    assert not restarts.decide(from_rank(fault()), 5, 1).refusal, "another step"
    assert not restarts.decide(killed(), 4, 2).refusal, "the machine's fault"
    decision = restarts.decide(from_rank(fault()), 4, 3)
    assert decision.repeated and "step 4" in decision.refusal


@pytest.mark.parametrize(
    "error, recovers",
    [
        (from_rank(WorkerError("", cause="killed")), True),
        (from_rank(WorkerError("", cause="heartbeat_timeout"), "critic rank 3"), True),
        (from_rank(ValueError()), True),
        (from_rank(RuntimeError("NCCL")), True),
        (NonFiniteError(), True),
        (from_rank(UserError("choose another")), False),
        (from_rank(WorkerError("", cause="killed"), "engine 0"), True),
        (from_rank(WorkerError("", cause="restart_limit"), "engine 0"), False),
        (from_rank(NonRetryableError()), False),
        (from_rank(WorkerError("", cause="cluster")), False),
        (WorkerError("a reward process"), False),
        (KeyError("a bug of the driver"), False),
    ],
)
def test_only_failures_of_worker_processes_are_recoverable(error, recovers):
    assert can_recover(error) == recovers
    assert bool(Restarts(1, 60).decide(error, 1, 0).refusal) != recovers


def test_without_restarts_every_failure_ends_the_run():
    decision = Restarts(0, 60).decide(killed(), 1, 0)
    assert decision.refusal and not decision.repeated
