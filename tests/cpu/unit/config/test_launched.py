"""Notes of jobs that a launcher runs in other processes, and the wait for those on this machine."""

from __future__ import annotations

import os
import subprocess
import threading

import psutil
import pytest

from tests.support.jobs import wait_until
from trainer.config.launched import JobResult, note_end, noted_ends, prepare_notes, wait_for_local_jobs
from trainer.errors import WorkerError

GOOD, BAD = JobResult("seed=1", 0, ""), JobResult("seed=2", 2, "trainer.seed=2: is refused")


@pytest.fixture
def notes(tmp_path, monkeypatch) -> str:
    """A sweep whose directory has a name with a pattern in it."""
    monkeypatch.setenv("TRAINER_SWEEP_NOTES", "")
    prepare_notes(str(tmp_path / "lr=[1]"))
    return os.environ["TRAINER_SWEEP_NOTES"]


def test_notes_are_read_in_the_order_of_the_jobs(notes):
    for number in (10, 2):
        note_end(number, JobResult(f"job {number}", 0, ""))
    assert [end.name for end in noted_ends()] == ["job 2", "job 10"]
    note_end(2, BAD)  # the job was run again
    assert noted_ends()[0] == BAD


def test_each_start_of_a_sweep_has_notes_of_its_own(notes, tmp_path):
    note_end(0, BAD)
    prepare_notes(str(tmp_path / "lr=[1]"))
    assert noted_ends() == [] and os.path.exists(f"{notes}/000000.json")


def test_a_failure_that_no_sweep_would_learn_of_is_raised(monkeypatch):
    monkeypatch.delenv("TRAINER_SWEEP_NOTES", raising=False)
    note_end(0, GOOD)
    assert noted_ends() == []
    with pytest.raises(WorkerError, match="^seed=2: trainer.seed=2: is refused"):
        note_end(0, BAD)


def test_only_jobs_of_submitit_are_waited_for():
    """The job, `cat`, ends when its input does."""
    other = subprocess.Popen(["sleep", "600"])
    job = subprocess.Popen(["bash", "-c", "exec -a submitit.local._local cat"], stdin=subprocess.PIPE)
    try:
        wait_until(lambda: psutil.Process(job.pid).cmdline() == ["submitit.local._local"])
        threading.Timer(0.1, job.stdin.close).start()
        assert wait_for_local_jobs() == 1
        assert other.poll() is None and not psutil.pid_exists(job.pid)
    finally:
        for process in (job, other):
            process.kill()
            process.wait()
