"""Runs of earlier versions: each format of checkpoints is continued, or refused by name."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.support.jobs import metrics, run_forked_job
from trainer.checkpoint.manifest import FORMAT_VERSION

ROOT = Path(__file__).parents[3]
SAVED = ROOT / "tests/data/checkpoints"
RUNS = sorted(path.parent.parent.parent.name for path in SAVED.glob("*/checkpoints/*/manifest.json"))
REFUSED = {"format-1"}
OLD_DEFAULTS = {
    "0.1.0-first": [
        *("algorithm.aggregation=token_mean", "algorithm.clip_high=0.28", "trainer.policy.optimizer.scheduler=cosine"),
        *("trainer.policy.optimizer.schedule_steps=2", "trainer.policy.optimizer.warmup_steps=5"),
    ]
}
"""Values that a run has and that were defaults then. Without them, a resume is refused, and names them."""

MIXES = {"0.3.0-mix": "{one: {files: [rows.jsonl], weight: 2}, two: {files: [rows.jsonl]}}"}
"""`data.mix` of a run, instead of `data.train_files`."""


def continue_run(name: str, directory: Path):
    """Give the command of a saved run once more, with two more steps."""
    shutil.copytree(SAVED, directory, dirs_exist_ok=True)
    words = ["model.path=model", "data=files", "data.val_files=[rows.jsonl]"]
    words += [f"data.mix={MIXES[name]}" if name in MIXES else "data.train_files=[rows.jsonl]"]
    words += ["reward.name=reverse_text", "rollout.max_prompt_tokens=32", "rollout.max_response_tokens=8"]
    words += ["trainer.val_interval=-1", "logger.plot=false", "data.train_size=-1", "data.val_size=-1"]
    words += ["trainer.policy.optimizer.lr=1e-3", "trainer.total_steps=4", "trainer.resume_mode=latest"]
    words += OLD_DEFAULTS.get(name, [])
    return run_forked_job(f"trainer.run_dir={name}", *words, cwd=directory)


def test_runs_of_all_versions_are_there():
    assert len(RUNS) >= 5 and set(RUNS) > REFUSED


@pytest.mark.parametrize("name", sorted(set(RUNS) - REFUSED))
def test_a_run_of_an_earlier_version_continues(name, tmp_path):
    done = continue_run(name, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{name}/checkpoints/global_step_2, step 2 of 4" in done.stdout
    assert [row["step"] for row in metrics(tmp_path / name)] == [1, 2, 3, 4]


def test_a_checkpoint_of_a_format_that_is_not_read_is_refused_by_name(tmp_path):
    done = continue_run("format-1", tmp_path)
    said = done.stdout + done.stderr
    assert done.returncode == 2, said
    assert re.search(rf"format-1/.*: its format is version 1, this program reads {FORMAT_VERSION}; resume with", said)
