"""What a job refuses before Ray starts, or as soon as it does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.jobs import run_forked_job


@pytest.mark.parametrize(
    "job, overrides, sentence",
    [
        (
            "sft",
            ["trainer.device=cuda", "--config=both.yaml"],
            "trainer.device=cuda: torch finds no CUDA device",
        ),
        (
            "sft",
            ["--config=both.yaml", "rollout.n=2", "algorithm=ppo"],
            "^error: rollout.n, algorithm=ppo: trainer.task=sft does not read them, so leave them out or",
        ),
        ("train", ["+algorithm.options.tau_pos=1"], "algorithm.options.tau_pos=1: no chosen function has this"),
    ],
)
def test_jobs_check_devices_and_what_they_read(job, overrides, sentence, tmp_path):
    """A config file may have keys of several tasks, the command line may not."""
    (tmp_path / "both.yaml").write_text("rollout: {n: 4}\nalgorithm: {options: {tau_pos: 1}}\n")
    done = run_forked_job(*overrides, cwd=tmp_path, job=job)
    assert done.returncode == 2, done.stdout + done.stderr
    assert re.search(sentence, done.stderr.strip().splitlines()[-1]), done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "outputs/default").exists(), "a refused command has left something"


def test_a_directory_with_a_run_is_refused_before_the_long_imports(tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')\n")
    run = tmp_path / "outputs/default"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[3]}"}
    done = subprocess.run(
        [sys.executable, "-m", "trainer", "train"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300
    )
    start = "error: trainer.run_dir=outputs/default: already holds a run; continue it with"
    assert done.returncode == 2 and done.stderr.startswith(start), done.stderr
    assert not (run / "starts.jsonl").exists()


_MEASURE = """
import sys, numpy, torch
from trainer.algorithms.correction import train_inference_mismatch
from trainer.config import Config
from trainer.main import prepare

cfg = Config()
cfg.trainer.run_dir = sys.argv[1]
cfg.trainer.device = "cpu"
prepare(cfg)
old, engine = torch.randn(2, 200, 1000, generator=torch.Generator().manual_seed(0))
print(train_inference_mismatch(old, engine, torch.ones_like(old)), float((old - engine).mean()))
"""


def test_what_the_driver_measures_does_not_depend_on_the_cores(tmp_path):
    """A resume on a machine with other cores checks the replayed steps to the last bit."""
    measured = []
    for cores in "1", "5":
        env = {**os.environ, "OMP_NUM_THREADS": cores, "MKL_NUM_THREADS": cores}
        command = [sys.executable, "-c", _MEASURE, str(tmp_path / cores)]
        done = subprocess.run(command, cwd=Path(__file__).parents[3], env=env, capture_output=True, text=True)
        assert not done.returncode, done.stderr
        measured.append(done.stdout.splitlines()[-1])
    assert measured[0] == measured[1]


def test_a_model_that_is_missing_is_refused_with_status_2(tmp_path):
    done = run_forked_job("model.path=no/such-model", cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "model.path=no/such-model" in done.stderr.strip().splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_a_bad_row_is_named_before_models_or_ranks_start(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINER_CACHE", str(tmp_path / "cache"))
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "answer": "b"}\n' * 30 + "{\n")
    words = ["data=files", "data.train_files=[a.jsonl]", "trainer.val_interval=-1"]
    done = run_forked_job(*words, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "data.train_files: a.jsonl:31 is not JSON" in done.stderr.splitlines()[-1], done.stderr
    assert not list((tmp_path / "cache").glob("tiny-*"))


def test_a_cluster_that_does_not_answer_is_refused_with_status_2(tmp_path):
    done = run_forked_job("trainer.ray_address=127.0.0.1:1", cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    sentence = "trainer.ray_address=127.0.0.1:1: no Ray cluster answers"
    assert sentence in done.stderr.strip().splitlines()[-1] and "Traceback" not in done.stderr, done.stderr


def test_prompts_that_are_all_too_long_are_refused(tmp_path):
    done = run_forked_job("rollout.max_prompt_tokens=2", cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "rollout.max_prompt_tokens=2" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "outputs/default/metrics.jsonl").exists()
