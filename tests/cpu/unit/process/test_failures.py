"""The class of a failure, the GPU behind it, and when the ranks start again."""

from __future__ import annotations

import errno
import os

import pytest
import torch

from trainer.errors import (
    DivergedError,
    FailureSource,
    NonFiniteError,
    NonRetryableError,
    UserError,
    WorkerError,
    set_failure_source,
)
from trainer.process.failures import (
    INFRASTRUCTURE,
    JOB,
    PREEMPTION,
    Decision,
    Restarts,
    broken_node,
    can_recover,
    classify,
    decide,
    gpu_error_in,
)
from trainer.process.signals import Stopped


def from_rank(error: Exception, name: str = "rank 0") -> Exception:
    set_failure_source(error, FailureSource(name))
    return error


def killed() -> Exception:
    return from_rank(WorkerError("rank 0 died", cause="killed"))


class Decided:
    """The restarts of a run, decided one after another."""

    def __init__(self, limit: int, window_s: float):
        self.past = Restarts(limit, window_s)

    def decide(self, error: Exception, step: int, now: float) -> Decision:
        decision, self.past = decide(self.past, error, step, now)
        return decision


def test_restarts_are_limited_within_the_window_and_delayed_exponentially():
    restarts = Decided(3, 60)
    assert [restarts.decide(killed(), 1, now).delay_s for now in (0, 10, 20)] == [0, 2, 4]
    decision = restarts.decide(killed(), 1, 30)
    assert decision.refusal and not decision.repeated
    assert restarts.decide(killed(), 1, 61).delay_s == 4, "the first has left the window"
    assert restarts.decide(killed(), 1, 200).delay_s == 0, "all have left it"
    assert restarts.past.count == 5


def test_no_delay_is_longer_than_five_minutes():
    restarts = Decided(50, 1e9)
    assert max(restarts.decide(killed(), 1, now).delay_s for now in range(50)) == 300


@pytest.mark.parametrize(
    "fault", [lambda: WorkerError("", cause="memory"), lambda: ValueError("a bug"), lambda: NonFiniteError("nan")]
)
def test_a_job_failure_at_the_same_step_is_not_retried_twice(fault):
    restarts = Decided(9, 60)
    assert not restarts.decide(from_rank(fault()), 4, 0).refusal
    assert not restarts.decide(from_rank(fault()), 5, 1).refusal, "another step"
    assert not restarts.decide(killed(), 4, 2).refusal, "the machine's fault"
    decision = restarts.decide(from_rank(fault()), 4, 3)
    assert decision.repeated and "step 4" in decision.refusal


def test_a_job_failure_of_another_kind_at_the_same_step_is_retried():
    restarts = Decided(9, 60)
    assert not restarts.decide(from_rank(ValueError("a bug")), 4, 0).refusal
    assert not restarts.decide(from_rank(NonFiniteError("nan")), 4, 1).refusal


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
    assert bool(Decided(1, 60).decide(error, 1, 0).refusal) != recovers


def test_without_restarts_every_failure_ends_the_run():
    decision = Decided(0, 60).decide(killed(), 1, 0)
    assert decision.refusal and not decision.repeated


BROKEN, MACHINE, PROGRAM = (True, True), (False, True), (False, False)
TEXTS = {
    "CUDA error: GPU 0000:01:00.0: GPU has fallen off the bus.": (*BROKEN, "GPU error"),
    "RuntimeError: CUDA error: uncorrectable ECC error encountered": (*BROKEN, "GPU error"),
    "CUDA error: CUDA-capable device(s) is/are busy or unavailable": (*MACHINE, "GPU error"),
    "CUDA error: an illegal memory access was encountered": (*PROGRAM, "CUDA error"),
    "CUDA out of memory. Tried to allocate 2.00 GiB": None,
}


def test_a_text_names_a_broken_gpu_a_failure_of_the_machine_or_a_faulty_program():
    assert {text: gpu_error_in(text) for text in TEXTS} == TEXTS


def test_an_error_that_names_a_broken_gpu_names_the_node_of_its_rank():
    error = RuntimeError("CUDA error: uncorrectable ECC error encountered")
    assert broken_node(error) is None
    set_failure_source(error, FailureSource("rank 0", "10.0.0.1"))
    assert broken_node(error) == ("10.0.0.1", "GPU error")
    for other in (killed(), from_rank(UserError("choose another")), KeyError("a bug of the driver")):
        assert broken_node(other) is None


FAILURES = [
    (WorkerError("rank 1 died", cause="killed"), INFRASTRUCTURE, "killed process"),
    (WorkerError("rank 1 is silent", cause="heartbeat_timeout"), INFRASTRUCTURE, "heartbeat timeout"),
    (WorkerError("rank 1 is late", cause="rpc_timeout"), INFRASTRUCTURE, "RPC timeout"),
    (WorkerError("Ray's raylet died", cause="cluster"), INFRASTRUCTURE, "Ray died"),
    (WorkerError("rank 1 has no memory left", cause="memory"), JOB, "out of memory"),
    (WorkerError("others hold the memory", cause="gpu_memory_in_use"), INFRASTRUCTURE, "GPU memory in use"),
    (WorkerError("the processes of reward.name die"), INFRASTRUCTURE, "process"),
    (torch.OutOfMemoryError("CUDA out of memory"), JOB, "out of memory"),
    (MemoryError(), JOB, "out of memory"),
    (NonFiniteError("the policy's loss is nan"), JOB, "non-finite number"),
    (DivergedError("the run has diverged"), JOB, "divergence"),
    (UserError("choose another"), JOB, "refused"),
    (ValueError("a bug"), JOB, "exception"),
    (TimeoutError("the user's function timed out"), JOB, "exception"),
    (ValueError("timed out"), JOB, "exception"),
    (RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:4242"), INFRASTRUCTURE, "network"),
    (RuntimeError("[gloo/unbound_buffer.cc:78] Timed out waiting 1800000ms"), INFRASTRUCTURE, "collective timeout"),
    (
        RuntimeError("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)"),
        INFRASTRUCTURE,
        "collective timeout",
    ),
    (RuntimeError("NCCL error: unhandled system error"), INFRASTRUCTURE, "network"),
    (RuntimeError("CUDA error: uncorrectable ECC error encountered"), INFRASTRUCTURE, "GPU error"),
    (RuntimeError("CUDA error: an illegal memory access was encountered"), JOB, "CUDA error"),
    (OSError(28, "No space left on device"), INFRASTRUCTURE, "storage"),
    (RuntimeError("Stale file handle"), INFRASTRUCTURE, "storage"),
    *((OSError(number, os.strerror(number)), INFRASTRUCTURE, "storage") for number in (errno.EIO, errno.ESTALE)),
    (ConnectionRefusedError(111, "Connection refused"), JOB, "exception"),
    *(
        (OSError(number, os.strerror(number), "gloo/tables.json"), JOB, "exception")
        for number in (errno.ENOENT, errno.EACCES, errno.EISDIR, errno.ENOTDIR, errno.EEXIST)
    ),
    (KeyError("Connection refused"), JOB, "exception"),
    (Stopped("stopped after step 3"), PREEMPTION, "stop request"),
    (KeyboardInterrupt(), PREEMPTION, "stop request"),
]


def test_each_failure_has_a_class_and_a_cause():
    wrong = [(error, classify(error)) for error, kind, cause in FAILURES if classify(error) != (kind, cause)]
    assert wrong == []
