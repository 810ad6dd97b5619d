"""Rewards of users in whole jobs: those that fail, those of several parts, and those that never succeed."""

from __future__ import annotations

import json
import re

import pytest

from tests.support.jobs import comparable, metrics, run_forked_job
from tests.support.runs import rollouts_of

MODULE = """
import os

def verl_row(completion, row):
    return float(completion == row["reward_model"]["ground_truth"])

def vowels(completion):
    return {"vowels": sum(c in "aeiou" for c in completion) / 100, "letters": len(completion) / 1000}

def rank(completions, answer):
    # Fails before and after the calls that the environment names.
    with open("calls.txt", "a") as file:
        file.write("x")
    first, last = int(os.environ.get("FAILS_BEFORE", 0)), int(os.environ.get("FAILS_AFTER", 10**9))
    if not first < os.path.getsize("calls.txt") <= last:
        raise ConnectionError("the judge is down")
    return [sorted(completions).index(c) / len(completions) for c in completions]
"""


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "mine.py").write_text(MODULE)
    return tmp_path


def test_a_reward_that_always_fails_is_refused_before_anything_starts(directory):
    done = run_forked_job("reward.name=mine:verl_row", cwd=directory)
    assert done.returncode == 2, done.stdout + done.stderr
    sentence = "fails for the first 3 rows of the data with their reference answers as completions (raised Key"
    assert done.stderr.count("\n") == 1 and f"reward.name=mine:verl_row: {sentence}" in done.stderr
    assert not (directory / "outputs" / "default" / "metrics.jsonl").exists()


JOB = [
    "reward.name=[mine:vowels,mine:rank]",
    "reward.weights=[1,0.5]",
    "trainer.total_steps=4",
    "rollout.max_response_tokens=3",
    "logger.plot=false",
    "logger.save_rollouts=true",
    "trainer.resume_mode=latest",
    "trainer.max_ckpts_to_keep=1",
    "trainer.keep_best=1",
]


def shown_samples(output: str) -> dict[str, list[str]]:
    """Step -> the samples of its validation."""
    shown: dict[str, list[str]] = {}
    for step, name in re.findall(r"^validation of step (\d+), sample \d of 3: (val:\d+:0)$", output, re.M):
        shown.setdefault(step, []).append(name)
    return shown


@pytest.mark.slow
def test_a_run_ends_when_its_rewards_fail_and_continues_when_they_work(directory, monkeypatch):
    """With a reward of several parts, which never is a success. While the run that continues is still starting, they
    fail; that refuses only a new run."""
    monkeypatch.setenv("FAILS_AFTER", str(6 + 16 + 8 + 8 + 16))  # two trials, two validations, two steps
    ended = run_forked_job(*JOB, "trainer.run_name=ended", cwd=directory)
    assert ended.returncode == 2, ended.stdout + ended.stderr
    (line,) = [line for line in ended.stderr.splitlines() if "reward.max_error_rate=0.2: " in line]
    assert (
        "32 of 32 rewards of step 3 (100.0%) failed (the first: rank: raised ConnectionError: the judge is down in "
        in line
    )
    run = directory / "outputs" / "ended"
    assert [row["step"] for row in metrics(run)] == [0, 1, 2]
    assert (run / "checkpoints" / "global_step_2" / "manifest.json").exists()

    monkeypatch.delenv("FAILS_AFTER")
    monkeypatch.setenv("FAILS_BEFORE", str((directory / "calls.txt").stat().st_size + 3))
    continued = run_forked_job(*JOB, "trainer.run_name=ended", cwd=directory)
    assert continued.returncode == 0, continued.stderr
    assert "WARNING: reward.name=mine:rank: fails for the first 3 rows" in continued.stdout + continued.stderr
    assert "the run continues, because it has trained before" in continued.stdout + continued.stderr
    monkeypatch.delenv("FAILS_BEFORE")
    whole = run_forked_job(*JOB, "trainer.run_name=whole", cwd=directory)
    assert whole.returncode == 0, whole.stderr
    rows = metrics(directory / "outputs" / "whole")
    assert comparable(metrics(run)) == comparable(rows)

    for row in rows[1:]:
        parts = row["reward/vowels/mean"] + row["reward/letters/mean"] + 0.5 * row["reward/rank/mean"]
        assert row["reward/mean"] == pytest.approx(parts, rel=1e-5)
    assert "val/reward/letters/mean" in rows[0] and "val/reward/letters/mean" not in rows[1]
    for rollout in rollouts_of(run, 3):
        assert set(rollout["rewards"]) == {"vowels", "letters", "rank"}
        assert rollout["rewards"]["letters"] == len(rollout["completion"][0]["content"]) / 1000

    for step in (0, 2, 4):
        file = f"validation/step_{step}.jsonl"
        assert (run / file).read_bytes() == (directory / "outputs" / "whole" / file).read_bytes()
    held_out = [json.loads(line) for line in (run / "validation" / "step_4.jsonl").read_text().splitlines()]
    assert [line["uid"] for line in held_out] == [f"val:{i}" for i in range(16)]
    assert sum(line["reward"] for line in held_out) / 16 == pytest.approx(rows[4]["val/reward/mean"])
    printed = [shown_samples(done.stdout) for done in (ended, continued, whole)]
    assert printed[2] == {**printed[0], **printed[1]} and list(printed[2]) == ["0", "2", "4"]
    assert all(len(names) == 3 for names in printed[2].values()) and len({*map(tuple, printed[2].values())}) == 3

    said = "NOTE: since step 0, val/accuracy is 0: no reward has reached reward.success_threshold yet; "
    assert [job.stdout.count(said) for job in (ended, continued, whole)] == [1, 0, 1]
    cut = "NOTE: since step 1, response_length/clip_ratio is above 0.5: "
    assert (ended.stdout.count(cut), continued.stdout.count(cut), whole.stdout.count(cut)) == (0, 1, 1)
    assert {row["val/accuracy"] for row in rows if "val/accuracy" in row} == {0.0}
    assert ", best val/accuracy 0.000 at the start, which no step has beaten" in whole.stdout
