"""The Slurm script, run by bash with stand-ins for the scheduler and for the job."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "examples/slurm/train.sbatch"


def start(tmp_path: Path, job: str, **env: str) -> subprocess.Popen:
    """The script, where `python` is the bash code `job` and `scontrol` writes its arguments to `requeued`."""
    for name, code in (("python", job), ("scontrol", f'echo "$@" >> {tmp_path}/requeued')):
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{code}\n")
        (tmp_path / name).chmod(0o755)
    return subprocess.Popen(
        ["bash", str(SCRIPT), "trainer.run_name=mine"],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "17", **env},
        start_new_session=True,
    )


def requeued(tmp_path: Path) -> bool:
    file = tmp_path / "requeued"
    assert not file.exists() or file.read_text() == "requeue 17\n"
    return file.exists()


@pytest.mark.parametrize(
    "job, status, again",
    [
        ("exit 0", 0, False),
        ("exit 2", 2, False),
        ("exit 1", 1, False),
        ("exit 3", 3, False),
        ("exit 75", 75, True),
        ("kill -KILL $$", 128 + signal.SIGKILL, True),
        ("kill -USR1 $$", 128 + signal.SIGUSR1, True),
    ],
)
def test_a_job_is_requeued_when_it_stopped_early_or_died_of_a_signal(job, status, again, tmp_path):
    assert start(tmp_path, job).wait(60) == status
    assert requeued(tmp_path) == again


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
@pytest.mark.parametrize("handled", [True, False])
def test_a_signal_reaches_the_job_and_the_script_waits_for_it(number, handled, tmp_path):
    """A job that handles it saves for a while and exits with 75; one that does not (yet) dies of it."""
    trap = f"trap 'sleep 0.5; touch {tmp_path}/saved; exit 75' USR1 TERM; " if handled else ""
    script = start(tmp_path, f'{trap}echo "$@" > {tmp_path}/args; touch {tmp_path}/up; while :; do sleep 0.05; done')
    while not (tmp_path / "up").exists():
        assert script.poll() is None
        time.sleep(0.02)
    script.send_signal(number)
    assert script.wait(60) == (75 if handled else 128 + number)
    assert requeued(tmp_path)
    assert (tmp_path / "saved").exists() == handled
    assert (tmp_path / "args").read_text() == "-m trainer train trainer.resume_mode=latest trainer.run_name=mine\n"


def test_requeueing_has_an_end(tmp_path):
    assert start(tmp_path, "kill -KILL $$", SLURM_RESTART_COUNT="100").wait(60) == 128 + signal.SIGKILL
    assert not requeued(tmp_path)
