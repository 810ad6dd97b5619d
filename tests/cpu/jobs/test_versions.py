"""Runs of earlier versions: each format of checkpoints is continued, or refused by name."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import metrics, run_forked_job
from tests.support.runs import rollouts_of
from trainer.checkpoint.manifest import FORMAT_VERSION

ROOT = Path(__file__).parents[3]
SAVED = ROOT / "tests/data/checkpoints"
RUNS = sorted(path.parent.parent.parent.name for path in SAVED.glob("*/checkpoints/*/manifest.json"))
REFUSED = {"format-1"}
LEDGER = ROOT / "trainer/data/ledger.py"
OLD_DEFAULTS = {
    "0.1.0-first": [
        *("algorithm.aggregation=token_mean", "algorithm.clip_high=0.28", "trainer.policy.optimizer.scheduler=cosine"),
        *("trainer.policy.optimizer.schedule_steps=2", "trainer.policy.optimizer.warmup_steps=5"),
    ]
}
"""Values that a run has and that were defaults then. Without them, a resume is refused, and names them."""

MIXES = {"0.3.0-mix": "{one: {files: [rows.jsonl], weight: 2}, two: {files: [rows.jsonl]}}"}
"""`data.mix` of a run, instead of `data.train_files`."""
IN_FLIGHT = {
    "0.3.0-in-flight": [
        *("rollout=vllm", "rollout.in_flight_updates=true", "rollout.window=16", "rollout.max_staleness=2"),
        *("rollout.n=2", "rollout.max_num_seqs=10", "rollout.max_response_tokens=192", "logger.save_rollouts=true"),
    ]
}
"""Settings of a run with rows that were trained ahead of others."""


def continue_run(name: str, directory: Path):
    """Give the command of a saved run once more, up to step 4."""
    shutil.copytree(SAVED, directory, dirs_exist_ok=True)
    words = ["model.path=model", "data=files", "data.val_files=[rows.jsonl]"]
    words += [f"data.mix={MIXES[name]}" if name in MIXES else "data.train_files=[rows.jsonl]"]
    words += ["reward.name=reverse_text", "rollout.max_prompt_tokens=32", "rollout.max_response_tokens=8"]
    words += ["trainer.val_interval=-1", "logger.plot=false", "data.train_size=-1", "data.val_size=-1"]
    words += ["trainer.policy.optimizer.lr=1e-3", "trainer.total_steps=4", "trainer.resume_mode=latest"]
    words += OLD_DEFAULTS.get(name, []) + IN_FLIGHT.get(name, [])
    return run_forked_job(f"trainer.run_dir={name}", *words, cwd=directory)


def saved_position(name: str) -> dict[str, Any]:
    """The position in the data that a run has saved."""
    (file,) = (SAVED / name).glob("checkpoints/*/data.json")
    return json.loads(file.read_text())


def test_runs_of_all_versions_are_there():
    assert len(RUNS) >= 6 and set(RUNS) > REFUSED
    newest = max(map(int, re.findall(r"^_?FORMAT\w* = (\d+)", LEDGER.read_text(), flags=re.MULTILINE)))
    assert {saved_position(name)["format"] for name in RUNS} == set(range(1, newest + 1))


@pytest.mark.parametrize("name", sorted(set(RUNS) - REFUSED))
def test_a_run_of_an_earlier_version_continues(name, tmp_path):
    done = continue_run(name, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    step = (SAVED / name / "checkpoints/latest_ckpt_global_step.txt").read_text().strip()
    assert f"{name}/checkpoints/global_step_{step}, step {step} of 4" in done.stdout
    assert [row["step"] for row in metrics(tmp_path / name)] == [1, 2, 3, 4]
    if name in IN_FLIGHT:
        later = [{row["uid"].rpartition(":")[0] for row in rollouts_of(tmp_path / name, step)} for step in (2, 3, 4)]
        uids = [uid for step in later for uid in step]
        assert len(uids) == len(set(uids)) == 3 * 8
        ahead = {f"{row['epoch']}:{row['index']}" for row in saved_position(name)["trained_ahead"]}
        assert len(ahead) == 6 and ahead.isdisjoint(uids), "trained before the checkpoint, and again"


def test_a_checkpoint_of_a_format_that_is_not_read_is_refused_by_name(tmp_path):
    done = continue_run("format-1", tmp_path)
    said = done.stdout + done.stderr
    assert done.returncode == 2, said
    assert re.search(rf"format-1/.*: its format is version 1, this program reads {FORMAT_VERSION}; resume with", said)
