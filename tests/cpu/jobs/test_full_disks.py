"""Whole jobs whose run directory is on a disk that becomes full: by their own journal, and by other programs."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.full_disk import free
from tests.support.jobs import comparable, metrics, run_forked_job
from tests.support.namespaces import small_disk
from trainer.models.tiny import TinyShape, build_tiny

STEPS = 12
FULL = "cannot be written (No space left on device)"


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> list[str]:
    """A job whose checkpoint has half a megabyte, and whose journal grows by 0.14 MB in a step, for the long answers.

    All its checkpoints and records together do not fit on `disk`.
    """
    root = tmp_path_factory.mktemp("job")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1}
    build_tiny(TinyShape(**sizes, head_dim=16), str(root / "model"))
    noise = random.Random(0)
    rows = [{"prompt": f"p{number}", "answer": noise.randbytes(16_000).hex()} for number in range(16)]
    for name, chosen in {"train": rows, "val": [{"prompt": "p", "answer": "a"}]}.items():
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chosen))
    return [
        f"model.path={root}/model",
        f"data.train_files=[{root}/train.jsonl]",
        f"data.val_files=[{root}/val.jsonl]",
        "data.train_size=-1",
        "data.val_size=-1",
        "trainer.train_batch_size=4",
        f"trainer.total_steps={STEPS}",
        "trainer.val_interval=3",
        "trainer.resume_mode=latest",
        "rollout.n=2",
        "rollout.max_response_tokens=8",
        "reward.name=tests.support.hashed_reward:hashed",
        "algorithm.policy_loss=tests.support.full_disk:filling_clip",
        "logger.plot=false",
    ]


@pytest.fixture(scope="module")
def uninterrupted(job, tmp_path_factory) -> list[dict]:
    """The metrics of a run that takes two steps more."""
    directory = tmp_path_factory.mktemp("uninterrupted")
    done = run_forked_job(*job, f"trainer.total_steps={STEPS + 2}", f"trainer.run_dir={directory}/run", cwd=directory)
    assert done.returncode == 0, done.stdout + done.stderr
    return comparable(metrics(directory / "run"))


@pytest.fixture
def disk() -> Iterator[Path]:
    with small_disk("1500k") as path:
        yield Path(path)


def logged(run: Path) -> list[str]:
    """The lines of `log.txt` without their times."""
    return [line[20:] for line in (run / "log.txt").read_text().splitlines()]


@pytest.mark.release
def test_a_disk_that_the_journal_fills_costs_the_records_alone(job, uninterrupted, disk, tmp_path):
    run = disk / "run"
    command = [*job, "trainer.ckpt_interval=-1", f"trainer.run_dir={run}"]
    done = run_forked_job(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("rollouts are not recorded any more") == 1 and "FAILED" not in done.stdout
    assert [*(run / ".journal").iterdir()] == []
    assert comparable(metrics(run)) == uninterrupted[: STEPS + 1]
    done = run_forked_job(*command, f"trainer.total_steps={STEPS + 2}", cwd=tmp_path)
    assert done.returncode == 0 and f"resumed from {run}/checkpoints/global_step_{STEPS}" in done.stdout, done.stderr
    assert done.stdout.count("rollouts are not recorded any more (a checkpoint has found the disk full)") == 1
    assert comparable(metrics(run)) == uninterrupted


def test_a_disk_that_is_full_for_some_steps_costs_the_checkpoints_of_these_steps_alone(
    job, uninterrupted, disk, tmp_path, monkeypatch
):
    run = disk / "run"
    monkeypatch.setenv("TEST_DISK", f"6,11,{disk}")
    command = [
        "rollout.journal=false",
        "trainer.ckpt_interval=8",
        "trainer.hf_save_interval=8",
        f"trainer.run_dir={run}",
    ]
    done = run_forked_job(*job, *command, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert comparable(metrics(run)) == uninterrupted[: STEPS + 1]
    assert {file.name for file in (run / "validation").iterdir()} == {f"step_{step}.jsonl" for step in (0, 3, 6, 9, 12)}
    assert {file.name for file in (run / "exports").glob("*/policy")} == {"policy"}
    warnings = [line for line in done.stdout.splitlines() if line.startswith("WARNING: ") and FULL in line]
    for name in ("metrics.jsonl", "validation/step_6.jsonl", "exports/global_step_8/policy"):
        assert sum(line.startswith(f"WARNING: {run}/{name}: ") for line in warnings) == 1, done.stdout
    assert f"the checkpoint of step 8 FAILED ([Errno 28] No space left on device: '{run}/metrics.jsonl')" in done.stdout
    printed = done.stdout.splitlines()
    assert [line for line in logged(run) if line in printed] == printed, "the log lacks lines"


def test_a_disk_that_stays_full_ends_the_run_and_the_same_command_continues_it(
    job, uninterrupted, disk, tmp_path, monkeypatch
):
    run = disk / "run"
    command = [*job, "trainer.ckpt_interval=6", f"trainer.run_dir={run}"]
    with monkeypatch.context() as patch:
        patch.setenv("TEST_DISK", f"8,99,{disk}")
        done = run_forked_job(*command, "rollout.journal=false", cwd=tmp_path)
    (sentence,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 1, sentence
    assert sentence == (
        f"error: step {STEPS} is trained but not saved: trainer.ckpt_path={run}/checkpoints: [Errno 28] No space left "
        f"on device: '{run}/metrics.jsonl'; the last good checkpoint is {run}/checkpoints/global_step_6. Repair that, "
        "then give the same command with trainer.resume_mode=latest: it trains again what is not saved."
    )
    assert comparable(metrics(run)) == uninterrupted[: len(metrics(run))]
    free(disk)
    done = run_forked_job(*command, "rollout.journal=false", cwd=tmp_path)
    assert done.returncode == 0 and f"resumed from {run}/checkpoints/global_step_6" in done.stdout, done.stderr
    assert comparable(metrics(run)) == uninterrupted[: STEPS + 1]
