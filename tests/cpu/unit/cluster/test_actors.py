"""What the driver raises for the failures of Ray actors, and that only actors are killed."""

from __future__ import annotations

import signal
import subprocess

import psutil
import pytest
from ray.exceptions import ActorDiedError, OutOfMemoryError, RayError, RayTaskError

from tests.support.jobs import wait_until
from trainer.cluster.actors import _kill_stopped, _original_error
from trainer.errors import UserError, WorkerError


def task_error(cause: Exception) -> RayTaskError:
    return RayTaskError("call", "the traceback", cause)


def test_the_error_of_a_worker_comes_without_ray_s_around_it():
    cause = UserError("choose another")
    assert _original_error(task_error(cause), "rank 0") is cause
    found = _original_error(task_error(KeyError("x")), "rank 0")
    assert type(found) is KeyError and "in rank 0; its own traceback" in found.__notes__[0]


@pytest.mark.parametrize(
    ("error", "reason", "cause"),
    [
        (OutOfMemoryError("low"), "Ray killed it because the memory of its machine ran low", "memory"),
        (ActorDiedError(), "its process was killed or crashed, perhaps because memory ran out", "killed"),
        (RayError("an object\nis lost"), "an object is lost", "killed"),
    ],
)
def test_the_death_of_a_worker_has_its_reason_and_a_hint(error, reason, cause):
    found = _original_error(error, "engine 1")
    assert isinstance(found, WorkerError) and found.cause == cause
    assert str(found).startswith(f"engine 1 died: {reason}") and "ray_logs of the run directory" in str(found)


def stopped(name: str) -> subprocess.Popen:
    """A process with this name that cannot respond."""
    process = subprocess.Popen(["bash", "-c", f"exec -a {name} sleep 600"])
    wait_until(lambda: psutil.Process(process.pid).cmdline()[:1] == [name])
    process.send_signal(signal.SIGSTOP)
    return process


def test_a_stopped_actor_is_killed_and_a_process_that_has_its_id_now_is_not():
    actor, other = stopped("ray::Host"), stopped("editor")
    try:
        for process in (actor, other, actor):
            _kill_stopped(process.pid)
        assert not psutil.pid_exists(actor.pid) and other.poll() is None
    finally:
        for process in (actor, other):
            process.kill()
            process.wait()
