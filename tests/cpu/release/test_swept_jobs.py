"""A sweep of real jobs that is steered by Optuna, killed, and continued."""

from __future__ import annotations

import signal
import sqlite3
from pathlib import Path

import pytest
import yaml

from tests.support.jobs import metrics, run_forked_job, start_forked_job, wait_until

pytestmark = pytest.mark.slow
SWEEP = [
    "-m",
    "hydra/sweeper=optuna",
    "hydra.sweeper.n_trials=2",
    "trainer.policy.optimizer.lr=interval(1e-4,1e-3)",
    "algorithm.policy_loss=gspo",
    "trainer.best_metric=val/reward/mean",
    "trainer.resume_mode=latest",
    "trainer.total_steps=3",
    "logger.plot=false",
]


def trials(directory: Path) -> list[tuple]:
    with sqlite3.connect(directory / "optuna.db") as database:
        return database.execute(
            "select number, state, value from trials left join trial_values using (trial_id) order by number"
        ).fetchall()


def test_a_killed_sweep_resumes_the_interrupted_job_and_runs_no_finished_job_again(tmp_path):
    """SIGKILL of all processes when the second of two jobs has saved, which then waits for its end."""
    directory, reached = tmp_path / "outputs/default", tmp_path / "reached"
    # The first job has saved 3 steps, and also the model of the warm start if the cache had none.
    env = {"TRAINER_FAILPOINT": f"save:published,5,{reached}"}
    process = start_forked_job(*SWEEP, cwd=tmp_path, env=env, log=tmp_path / "log")
    wait_until(lambda: reached.exists() or process.poll() is not None)
    process.kill_group()
    assert process.wait() == -signal.SIGKILL, (tmp_path / "log").read_text()
    (first_line, *_), before = trials(directory), {path.name for path in directory.glob("trainer*")}
    assert first_line[1] == "COMPLETE" and trials(directory)[1][1:] == ("RUNNING", None)
    first = next(path for path in directory.glob("trainer*") if (path / "checkpoints/global_step_3").exists())
    stamp = (first / "metrics.jsonl").stat().st_mtime_ns

    done = run_forked_job(*SWEEP, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 of 2 trials are finished" in done.stdout and "resumed from" in done.stdout
    assert "best val/reward/mean" in done.stdout and (directory / "sweep.png").exists()
    assert {path.name for path in directory.glob("trainer*")} == before
    assert (first / "metrics.jsonl").stat().st_mtime_ns == stamp
    # Step 0 has the initial weights, which all trials share.
    best = {max(row.get("val/reward/mean", 0.0) for row in metrics(path)[1:]) for path in directory.glob("trainer*")}
    assert [trial[:2] for trial in trials(directory)] == [(0, "COMPLETE"), (1, "COMPLETE")]
    assert {trial[2] for trial in trials(directory)} == best
    for path in directory.glob("trainer*"):
        algorithm = yaml.safe_load((path / "config.yaml").read_text())["algorithm"]
        options = {key: algorithm[key] for key in ("policy_loss", "clip_low", "clip_high", "aggregation")}
        assert options == {"policy_loss": "gspo", "clip_low": None, "clip_high": None, "aggregation": None}, "its own"
