"""The Slurm script, run by bash with stand-ins. tests/cpu/release/test_slurm_jobs.py runs it in a real Slurm."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "examples/slurm/train.sbatch"


RUNNING = "JobState=RUNNING Restarts=0 EndTime=Unknown PreemptTime=None"


def start(tmp_path: Path, job: str, state: str = RUNNING, **env: str) -> subprocess.Popen:
    """The script, where `python` is the bash code `job`, and `scontrol` shows `state` or writes to `requeued`."""
    scheduler = f"""case "$1 $2" in
  "show hostnames") printf "one\\ntwo\\n" ;;
  "show job") echo "JobId=$3 {state}" ;;
  *) echo "$@" >> {tmp_path}/requeued ;;
esac"""
    for name, code in (("python", job), ("scontrol", scheduler)):
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


@pytest.mark.parametrize(
    "state, again",
    [
        ("JobState=COMPLETING Restarts=1 EndTime=Unknown PreemptTime=None", False),
        ("JobState=COMPLETING Restarts=0 EndTime=2100-01-01T00:00:00 PreemptTime=None", False),
        ("JobState=COMPLETING Restarts=0 EndTime=2026-01-01T00:00:00 PreemptTime=None", True),
        ("JobState=COMPLETING Restarts=0 EndTime=2100-01-01T00:00:00 PreemptTime=2026-01-01T00:00:00", True),
    ],
    ids=["requeued by Slurm", "cancelled", "out of time", "pre-empted"],
)
@pytest.mark.parametrize("job", ["exit 75", "kill -TERM $$"])
def test_a_job_that_slurm_ends_is_requeued_unless_slurm_does_it_or_it_is_cancelled(job, state, again, tmp_path):
    start(tmp_path, job, state).wait(60)
    assert requeued(tmp_path) == again


def test_the_job_learns_when_slurm_will_end_it(tmp_path):
    """Slurm sets the variable only since 23.02."""
    job = f'echo "$SLURM_JOB_END_TIME" > {tmp_path}/end'
    limited = RUNNING.replace("Unknown", "2100-01-01T00:00:00")
    for state, env, end in [
        (limited, {"TZ": "UTC"}, "4102444800"),
        (limited, {"SLURM_JOB_END_TIME": "5"}, "5"),
        (RUNNING, {}, ""),
    ]:
        assert start(tmp_path, job, state, **env).wait(60) == 0
        assert (tmp_path / "end").read_text() == f"{end}\n"


def test_requeueing_has_an_end(tmp_path):
    assert start(tmp_path, "kill -KILL $$", SLURM_RESTART_COUNT="100").wait(60) == 128 + signal.SIGKILL
    assert not requeued(tmp_path)


NODES = r"""#!/usr/bin/env bash
# Stands in for srun: runs the command once for each of two nodes, with the variables that Slurm gives.
[ "$*" != "--nodes=1 --ntasks=1 --relative=1 getent ahostsv4 one" ] || { echo "10.0.0.1 STREAM one"; exit; }
while [[ "$1" == --* ]]; do shift; done
for node in 0 1; do SLURM_NODEID=$node "$@" & done
wait
"""


def start_on_two_nodes(tmp_path: Path, job: str, ray: str) -> subprocess.Popen:
    """The script in a job of two nodes, where `ray` is this bash code."""
    for name, code in (("srun", NODES), ("ray", f"#!/usr/bin/env bash\n{ray}")):
        (tmp_path / name).write_text(code)
        (tmp_path / name).chmod(0o755)
    job = f'if [ "$1" = -c ]; then echo secret; exit; fi; {job}'
    env = {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "nodes[1-2]"}
    return start(tmp_path, job, **env)


def test_several_nodes_form_a_cluster_that_the_job_joins(tmp_path):
    ray = f"""[ "$1" = status ] && {{ [ -e {tmp_path}/up ]; exit; }}
echo "$SLURM_NODEID $* $RAY_AUTH_MODE $RAY_AUTH_TOKEN" >> {tmp_path}/calls
[ "$3" = --head ] && touch {tmp_path}/up
exec sleep 1"""
    both = f'until [ "$(wc -l < {tmp_path}/calls)" -ge 2 ]; do sleep 0.05; done'
    job = f'[ -e {tmp_path}/up ] || exit 9; {both}; echo "$@" > {tmp_path}/args; exit 75'
    assert start_on_two_nodes(tmp_path, job, ray).wait(120) == 75
    assert requeued(tmp_path), "on other nodes"
    head, worker = sorted((tmp_path / "calls").read_text().splitlines())
    assert head == "0 start --block --head --node-ip-address=10.0.0.1 --port=6379 token secret"
    assert worker == "1 start --block --address=10.0.0.1:6379 token secret"
    joined = "trainer.ray_address=10.0.0.1:6379 trainer.placement_timeout_s=600 trainer.run_name=mine"
    assert (tmp_path / "args").read_text() == f"-m trainer train trainer.resume_mode=latest {joined}\n"


def test_a_signal_while_the_cluster_starts_requeues_the_job(tmp_path):
    ray = f"touch {tmp_path}/asked; [ $1 != status ]"
    script = start_on_two_nodes(tmp_path, f"touch {tmp_path}/trained", ray)
    while not (tmp_path / "asked").exists():
        assert script.poll() is None
        time.sleep(0.02)
    script.send_signal(signal.SIGUSR1)
    assert script.wait(120) == 75
    assert requeued(tmp_path) and not (tmp_path / "trained").exists()
