"""Sweeps whose jobs only compute a number. `test_swept_jobs.py` has one with real jobs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.forks import run_forked
from tests.support.jobs import environment
from trainer.config.command_line import register_plugins
from trainer.errors import UserError

JOB = """
import json, logging, os, signal, sys, time
from trainer.config.command_line import run_app
from trainer.errors import UserError

def job(cfg):
    from trainer.process.log_setup import LOG_FILE
    from trainer.process.signals import SIGNALS
    lr, seed = cfg.trainer.policy.optimizer.lr, cfg.trainer.seed
    with open("jobs", "a") as file:
        file.write(json.dumps([lr, cfg.trainer.run_dir]) + "\\n")
    with open("groups", "a") as file:
        file.write(f"{cfg.trainer.run_name} {cfg.logger.name}\\n")
    if os.path.exists("kill") and len(open("jobs").readlines()) == int(open("kill").read()):
        os.kill(os.getpid(), signal.SIGKILL)
    if seed == 2:
        raise UserError("trainer.seed=2: is refused")
    if seed == 3:
        raise RuntimeError("a bug")
    if seed == 4:
        return None
    if seed == 6:
        return 0.0
    os.makedirs(cfg.trainer.run_dir, exist_ok=True)
    LOG_FILE.open(os.path.join(cfg.trainer.run_dir, "log.txt"))
    if seed == 8:
        logging.getLogger("trainer.job").info("waiting")
        while True:
            SIGNALS.check()
            time.sleep(0.01)
    with open(os.path.join(cfg.trainer.run_dir, "metrics.jsonl"), "w") as file:
        file.write(json.dumps({"step": 1, "val/accuracy": 1 - (lr - 0.3) ** 2}) + "\\n")
    return 1 - (lr - 0.3) ** 2

run_app(job)
"""
SUPERVISED_JOB = """
import contextlib, json, os
import trainer.jobs
from trainer.cluster import early_start
from trainer.main import main_sft as main
from trainer.run.run_metadata import record_start

def train(task, device, early, on_step):
    cfg = task.cfg
    lr = cfg.sft.optimizer.lr
    os.makedirs(cfg.trainer.run_dir, exist_ok=True)
    record_start(cfg.trainer.run_dir, cfg)
    with open("jobs", "a") as file:
        file.write(json.dumps([lr, cfg.trainer.run_dir]) + "\\n")
    with open(os.path.join(cfg.trainer.run_dir, "metrics.jsonl"), "w") as file:
        file.write(json.dumps({"step": 1, "sft/loss": 1.0, "val/loss": (lr - 0.3) ** 2}) + "\\n")

trainer.jobs.run_task = train
early_start.early_ray = lambda *_: contextlib.nullcontext()
main()
"""
OPTUNA = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=4", "trainer.policy.optimizer.lr=interval(0.1,0.9)"]


def sweep(directory: Path, *overrides: str, script: str = JOB) -> subprocess.CompletedProcess[str]:
    directory.mkdir(exist_ok=True)
    (directory / "job.py").write_text(script)
    return run_forked("job", ["-m", *overrides], directory, environment(), 300)


def jobs(directory: Path) -> list[list]:
    return [json.loads(line) for line in (directory / "jobs").read_text().splitlines()]


def test_a_failed_job_does_not_end_the_others_and_the_status_says_so(tmp_path):
    done = sweep(tmp_path, "trainer.seed=1,2,3,5", "rollout.n=4")
    assert done.returncode == 1
    assert [Path(path).name for _, path in jobs(tmp_path)] == [f"trainer.seed={seed}" for seed in (1, 2, 3, 5)]
    assert "error: trainer.seed=2: is refused\n" in done.stderr and "RuntimeError: a bug\n" in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: 2 of 4 jobs failed: outputs/default/trainer.seed=2; outputs/default/")
    log = (tmp_path / "outputs/default/trainer.seed=5/log.txt").read_text()
    assert "error" not in log, "a log has nothing of the other jobs"


def test_a_sweep_whose_failed_jobs_were_all_refused_ends_with_status_2(tmp_path):
    assert sweep(tmp_path, "trainer.seed=2,5").returncode == 2


def test_optuna_maximizes_the_best_metric(tmp_path):
    done = sweep(tmp_path, *OPTUNA, "trainer.run_name=found")
    assert done.returncode == 0, done.stderr
    distances = {abs(lr - 0.3): lr for lr, _ in jobs(tmp_path)}
    assert len(distances) == 4
    wanted = distances[min(distances)]
    found = (tmp_path / "outputs/found/optimization_results.yaml").read_text()
    assert f"trainer.policy.optimizer.lr: {wanted}" in found
    assert {str(Path(path).parent) for _, path in jobs(tmp_path)} == {"outputs/found"}
    assert "best val/accuracy" in done.stdout and (tmp_path / "outputs/found/sweep.png").stat().st_size > 5000
    assert "Warning" not in done.stderr


SUPERVISED = [
    "hydra/sweeper=optuna",
    "hydra.sweeper.n_trials=2",
    "sft.optimizer.lr=interval(0.1,0.9)",
    "data=files",
    "data.train_files=[x.jsonl]",
    "data.val_files=[y.jsonl]",
]


def test_optuna_minimizes_the_validation_loss_of_supervised_jobs(tmp_path):
    done = sweep(tmp_path, *SUPERVISED, "trainer.run_name=found", script=SUPERVISED_JOB)
    assert done.returncode == 0, done.stdout + done.stderr
    distances = {abs(lr - 0.3): lr for lr, _ in jobs(tmp_path)}
    assert len(distances) == 2
    found = (tmp_path / "outputs/found/optimization_results.yaml").read_text()
    assert f"sft.optimizer.lr: {distances[min(distances)]}" in found
    assert "best val/loss" in done.stdout and done.stdout.index("sweep.png") > 0


def test_a_killed_optuna_sweep_continues_like_an_uninterrupted_one(tmp_path):
    """SIGKILL in trial 4, which is run again with the same values."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    command = [*OPTUNA, "trainer.resume_mode=latest", "hydra.sweeper.sampler.n_startup_trials=3"]
    command[1] = "hydra.sweeper.n_trials=5"
    assert sweep(whole, *command).returncode == 0
    killed.mkdir()
    (killed / "kill").write_text("4")
    assert sweep(killed, *command).returncode == -9
    (killed / "kill").unlink()
    done = sweep(killed, *command)
    assert done.returncode == 0 and "3 of 5 trials are finished" in done.stdout, done.stdout + done.stderr
    expected = jobs(whole)
    assert jobs(killed) == [*expected[:4], *expected[3:]]
    results = "outputs/default/optimization_results.yaml"
    assert (killed / results).read_text() == (whole / results).read_text()
    again = sweep(killed, *command)
    assert again.returncode == 0 and len(jobs(killed)) == 6, "a finished sweep has nothing left to do"


def test_trials_without_the_metric_or_with_errors_fail_and_the_sweep_says_so(tmp_path):
    done = sweep(tmp_path, "hydra/sweeper=optuna", "hydra.sweeper.n_trials=2", "trainer.seed=choice(4)")
    assert done.returncode == 2
    assert "error: trainer.best_metric=val/accuracy: no step has measured it\n" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: 2 of 2 jobs failed") and "Traceback" not in done.stderr
    done = sweep(
        tmp_path,
        "hydra/sweeper=optuna",
        "hydra.sweeper.n_trials=2",
        "trainer.seed=choice(4)",
        "trainer.resume_mode=latest",
    )
    assert done.returncode == 2 and "outputs/default: all 2 trials have failed; choose another" in done.stderr


def test_the_jobs_of_a_smoke_sweep_stay_together(tmp_path):
    done = sweep(tmp_path, "experiment=smoke", "trainer.seed=1,5")
    assert done.returncode == 0, done.stderr
    one, two = (Path(path) for _, path in jobs(tmp_path))
    assert one.parent == two.parent and one.parent.parent == Path("outputs/smoke")
    assert (tmp_path / one.parent / "sweep.png").exists()
    assert (tmp_path / "groups").read_text() == "default default/trainer.seed=1\ndefault default/trainer.seed=5\n", (
        "W&B shows them together, named by their overrides"
    )


def test_jobs_that_would_share_a_directory_are_refused(tmp_path):
    done = sweep(tmp_path, "trainer.run_dir=here", "trainer.seed=1,5")
    assert done.returncode == 2 and not (tmp_path / "jobs").exists()
    assert "error: trainer.run_dir: all jobs of a sweep would share it; name the sweep" in done.stderr
    done = sweep(tmp_path, "trainer.run_dir=here${sweep_suffix:}", "trainer.seed=1,5")
    assert [path for _, path in jobs(tmp_path)] == ["here/trainer.seed=1", "here/trainer.seed=5"], done.stderr


def test_a_trial_whose_accuracy_is_0_says_that_optuna_cannot_use_it(tmp_path):
    optuna = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=2", "hydra.sweeper.sampler.seed=1"]
    done = sweep(tmp_path, *optuna, "trainer.seed=6,7")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trainer.best_metric=val/reward/mean compares such jobs") == 1


def test_a_directory_name_is_cut_to_what_a_file_system_takes(tmp_path):
    names = ",".join("x" * 150 + end for end in "ab")
    done = sweep(tmp_path, f"logger.project={names}", f"logger.name={names}")
    assert done.returncode == 0, done.stderr
    paths = {Path(path).name for _, path in jobs(tmp_path)}
    assert len(paths) == 4 and all(len(path) <= 200 for path in paths)


def test_a_plugin_that_is_not_installed_is_named_with_the_extra(monkeypatch):
    with pytest.raises(UserError, match="hydra/launcher=joblib: jobs of a sweep run one after another"):
        register_plugins(["hydra/launcher=joblib"])
    monkeypatch.setitem(sys.modules, "hydra_plugins.hydra_optuna_sweeper", None)
    with pytest.raises(UserError, match="needs the package hydra-optuna-sweeper; install the extra `sweeps`"):
        register_plugins(["hydra/sweeper=optuna"])


def test_an_optuna_that_pip_has_chosen_by_itself_is_refused_with_the_command_that_replaces_it(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    information = tmp_path / "optuna-2.10.1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: optuna\nVersion: 2.10.1\n")
    with pytest.raises(UserError, match=r"needs optuna>=4.9,<5, and 2.10.1 is installed; give `pip install 'optuna>"):
        register_plugins(["hydra/sweeper=optuna"])
    shutil.rmtree(information)
    register_plugins(["hydra/sweeper=optuna"])


def test_a_secret_names_no_directory_of_a_sweep(tmp_path):
    options = "+environment.kwargs={api_key:hush-1,n:1},{api_key:hush-2,n:2}"
    done = sweep(tmp_path, options, "trainer.policy.optimizer.lr=0.1", "++environment.kwargs.token=hush-3")
    assert done.returncode == 0, done.stderr
    names = [name for _, folders, files in os.walk(tmp_path) for name in [*folders, *files]]
    assert [name for name in names if "n:1" in name or "n: 1" in name] and not [
        name for name in names if "hush" in name
    ]
    done = sweep(tmp_path, "+environment.kwargs.api_key=hush-1,hush-2")
    assert done.returncode == 2 and "would differ only in a secret" in done.stderr and "hush" not in done.stderr
