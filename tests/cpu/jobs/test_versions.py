"""Runs of earlier versions: each format of checkpoints is continued, or refused by name."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.forks import run_forked
from tests.support.jobs import comparable, environment, metrics, run_forked_job
from tests.support.runs import rollouts_of
from trainer.checkpoint.manifest import FORMAT_VERSION
from trainer.evaluate.results import read_results
from trainer.view.build import Builder, Limits

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
TWO_RANKS = {
    "0.2.0-ppo": ["algorithm=ppo", "trainer.critic.optimizer.lr=1e-3"],
    "0.2.0-lora": ["trainer.policy.lora.rank=2", "algorithm.kl_coef=0.01"],
}
"""Settings of runs on two ranks, whose whole directories are kept: with critic and reference, and with adapters."""
EVALUATION = "0.3.0-evaluation"
"""An evaluation of the checkpoint of `0.2.0-ppo`."""


def continue_run(name: str, directory: Path, *more: str):
    """Give the command of a saved run once more, up to step 4."""
    shutil.copytree(SAVED, directory, dirs_exist_ok=True)
    words = ["model.path=model", "data=files", "data.val_files=[rows.jsonl]"]
    words += [f"data.mix={MIXES[name]}" if name in MIXES else "data.train_files=[rows.jsonl]"]
    words += ["reward.name=reverse_text", "rollout.max_prompt_tokens=32", "rollout.max_response_tokens=8"]
    words += ["trainer.val_interval=-1", "logger.plot=false", "data.train_size=-1", "data.val_size=-1"]
    words += ["trainer.policy.optimizer.lr=1e-3", "trainer.total_steps=4", "trainer.resume_mode=latest"]
    words += OLD_DEFAULTS.get(name, []) + IN_FLIGHT.get(name, []) + TWO_RANKS.get(name, [])
    return run_forked_job(f"trainer.run_dir={name}", *words, *more, cwd=directory)


def say(directory: Path, *words: str) -> str:
    """Return what `trainer WORDS` prints in the directory. It must succeed."""
    done = run_forked("trainer", words, directory, environment(), timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def saved_position(name: str) -> dict[str, Any]:
    """The position in the data that a run has saved."""
    (file,) = (SAVED / name).glob("checkpoints/*/data.json")
    return json.loads(file.read_text())


def test_runs_of_all_versions_are_there():
    assert len(RUNS) >= 6 and set(RUNS) > REFUSED
    newest = max(map(int, re.findall(r"^_?FORMAT\w* = (\d+)", LEDGER.read_text(), flags=re.MULTILINE)))
    assert {saved_position(name)["format"] for name in RUNS} == set(range(1, newest + 1))


@pytest.mark.parametrize("name", sorted(set(RUNS) - REFUSED - set(TWO_RANKS)))
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


@pytest.mark.slow
@pytest.mark.parametrize("name", TWO_RANKS)
def test_a_run_of_two_ranks_continues_on_two_ranks_and_on_one(name, tmp_path):
    """The shards of both ranks are read by one: both runs go on in the same way, to rounding."""
    rows = []
    for ranks in (2, 1):
        directory = tmp_path / str(ranks)
        done = continue_run(name, directory, f"trainer.num_workers={ranks}")
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"{name}/checkpoints/global_step_2, step 2 of 4" in done.stdout
        assert f"{ranks} rank(s)" in done.stdout
        rows.append(metrics(directory / name))
        assert [row["step"] for row in rows[-1]] == [0, 1, 2, 3, 4]
    two, one = map(comparable, rows)
    assert one == [pytest.approx(row, rel=1e-3, abs=1e-6) for row in two]
    saved = [str(tmp_path / ranks / name / "checkpoints/global_step_4") for ranks in "21"]
    tensors = json.loads(say(tmp_path, "checkpoint", "diff", *saved, "--json"))["tensors"]
    assert {row["name"].partition("/")[2] for row in tensors if row["note"]} == {"rng_rank1.others", "rng_rank1.torch"}
    assert len(tensors) > 50 and max(row["relative"] for row in tensors if not row["note"]) < 1e-4


@pytest.mark.parametrize("name", TWO_RANKS)
def test_the_directory_of_an_earlier_run_is_read(name, tmp_path):
    shutil.copytree(SAVED, tmp_path, dirs_exist_ok=True)
    diagnosed = say(tmp_path, "diagnose", name)
    assert re.search(r"^run +\S+: step 2 of 2 is logged$", diagnosed, flags=re.MULTILINE), diagnosed
    assert "global_step_2, saved at 2026-11-27T21:3" in diagnosed and "(all bytes agree)" in diagnosed
    assert "every byte is as it was saved; " in say(tmp_path, "checkpoint", "verify", name)
    (tmp_path / name / "checkpoints/global_step_2/policy/__1_0.distcp").write_bytes(b"damaged")
    assert "all bytes agree" not in say(tmp_path, "diagnose", name)
    kept = {path.name for path in (tmp_path / name).iterdir()}
    assert kept >= {"starts.jsonl", "config.yaml", "metrics.jsonl", "log.txt", "committed.json"}
    (start,) = map(json.loads, (tmp_path / name / "starts.jsonl").read_text().splitlines())
    assert start["versions"]["trainer"] == "0.2.0"


def test_runs_of_earlier_versions_are_compared_and_shown(tmp_path):
    """The table has what their `config.yaml` says otherwise, by its keys of today."""
    shutil.copytree(SAVED, tmp_path, dirs_exist_ok=True)
    table = say(tmp_path, "compare", *TWO_RANKS, "--out", "curves.png")
    assert all(key in table for key in ("advantage_estimator", "kl_coef", "rank")), table
    builder = Builder([str(tmp_path / name) for name in TWO_RANKS], Limits())
    page = builder.page()
    assert builder.notes == [] and all(f'"{name}"' in page for name in TWO_RANKS)


def test_an_evaluation_of_an_earlier_version_is_read_and_compared(tmp_path):
    shutil.copytree(SAVED / EVALUATION, tmp_path / "a")
    values = read_results(str(tmp_path / "a")).sets["default"].values["avg@2"]
    assert sorted(values.values()) == pytest.approx([0, 0, 0, 0.1])
    found = json.loads(say(tmp_path, "evaluate", "compare", "a", str(SAVED / EVALUATION), "--json"))
    assert found, "nothing is compared"
    transcripts = [json.loads(line) for line in say(tmp_path, "rollouts", "a").splitlines()]
    assert len(transcripts) == 12 and {row["group"] for row in transcripts} == {f"val:{number}" for number in range(4)}


def test_a_checkpoint_of_a_format_that_is_not_read_is_refused_by_name(tmp_path):
    done = continue_run("format-1", tmp_path)
    said = done.stdout + done.stderr
    assert done.returncode == 2, said
    assert re.search(rf"format-1/.*in format 1, and .* reads format {FORMAT_VERSION}; install the version that", said)
