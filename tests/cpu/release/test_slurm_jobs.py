"""Whole jobs in a real Slurm, by the script of the examples. test_slurm.py has the cases of the script."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.jobs import comparable, forked_arguments, metrics, run_forked_job
from tests.support.slurm import CPUS, MEMORY_MB, Slurm

STEPS = 24  # so many that the job lasts until it is disturbed, on a quick machine, too
JOB = (
    f"trainer.total_steps={STEPS}",
    f"trainer.hf_save_interval={STEPS}",
    "trainer.val_interval=-1",
    "logger.plot=false",
)


def weights(run: Path) -> bytes:
    return (run / f"exports/global_step_{STEPS}/policy/model.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_job_that_slurm_requeues_in_every_way_is_the_job_that_it_never_disturbed(tmp_path):
    """It is requeued by an administrator or for another job, before its time limit, and because its node is lost."""
    alone = run_forked_job(*JOB, f"trainer.run_dir={tmp_path}/alone", cwd=tmp_path)
    assert alone.returncode == 0, alone.stdout + alone.stderr
    run = tmp_path / "run"
    with Slurm(["one", "two"]) as slurm:
        job = slurm.submit(*forked_arguments(*JOB, f"trainer.run_dir={run}", job="train")[1:])
        place = slurm.wait_for("global_step_1 ")
        slurm.run("scontrol", "requeue", job)
        place = slurm.wait_for("the job ended with status 75: requeued by Slurm", place)
        place = slurm.wait_for(r"resumed from \S*global_step_.*?step \d+/", place)
        slurm.run("scancel", "--batch", "--signal=USR1", job)
        place = slurm.wait_for("SIGUSR1: finishing this step", place)
        place = slurm.wait_for(r"saved .*?the job ended with status 75: requeued\n", place)
        place = slurm.wait_for(r"resumed from \S*global_step_.*?step \d+/", place)
        slurm.lose(slurm.state(job, "BatchHost"))
        slurm.wait_for(rf"resumed from .*?finished step {STEPS} of {STEPS}", place)
        assert slurm.wait_for_state(job, "COMPLETED", "FAILED") == "COMPLETED"
        assert int(slurm.state(job, "Restarts")) >= 3
    assert comparable(metrics(run)) == comparable(metrics(tmp_path / "alone"))
    assert weights(run) == weights(tmp_path / "alone")


@pytest.mark.parametrize(
    ("options", "resources"),
    [
        ([], f"cpu={CPUS},mem={MEMORY_MB}M,"),
        (["--oversubscribe", "--cpus-per-task=1", "--mem=300"], "cpu=1,mem=300M,"),
    ],
)
def test_a_job_has_a_whole_node_unless_it_asks_for_a_part(options, resources):
    with Slurm(["one"]) as slurm:
        job = slurm.submit("no.such=key", options=options)
        slurm.wait_for_state(job, "RUNNING", "FAILED")
        assert slurm.state(job, "TRES").startswith(resources)


def test_a_job_that_is_cancelled_is_not_requeued(tmp_path):
    with Slurm(["one"]) as slurm:
        job = slurm.submit(*forked_arguments(*JOB, f"trainer.run_dir={tmp_path}/run", job="train")[1:])
        slurm.wait_for("training starts from the beginning")
        slurm.run("scancel", job)
        slurm.wait_for("the job ended with status 75: cancelled, so not requeued")
        assert slurm.wait_for_state(job, "CANCELLED", "PENDING") == "CANCELLED"
