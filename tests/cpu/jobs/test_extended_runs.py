"""A run that is made longer gives what one long run gives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.jobs import comparable, metrics, run_forked_job
from trainer.config import compose

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def checkpoint_files(run: Path, step: int) -> dict[str, str]:
    """Hashes of what a checkpoint holds, but for what names the run or the save."""
    manifest = json.loads((run / f"checkpoints/global_step_{step}/manifest.json").read_text())
    own = ("config.yaml", "trainer_state.json", "policy/.metadata")
    return {entry["path"]: entry["hash"] for entry in manifest["files"] if entry["path"] not in own}


def test_two_short_runs_equal_one_long_run(tmp_path):
    base = ["sft.optimizer.scheduler=cosine", "sft.optimizer.schedule_steps=5", "trainer.val_interval=2",
            "trainer.resume_mode=latest", "logger.plot=false"]  # fmt: skip
    for name, lengths in (("whole", [4]), ("extended", [2, 4])):
        for steps in lengths:
            done = run_forked_job(*base, f"trainer.run_name={name}", f"sft.steps={steps}", job="sft", cwd=tmp_path)
            assert done.returncode == 0, done.stdout + done.stderr
    whole, extended = (tmp_path / "outputs" / name for name in ("whole", "extended"))
    assert comparable(metrics(extended)) == comparable(metrics(whole))
    assert checkpoint_files(extended, 4) == checkpoint_files(whole, 4)


def test_another_model_is_not_trained_with_the_settings_of_the_embedded_one():
    embedded, own = (compose(overrides).trainer.policy.optimizer for overrides in ([], ["model.path=a/model"]))
    assert (embedded.lr, embedded.scheduler, embedded.schedule_steps) == (4e-4, "cosine", 140)
    assert own == compose(["model=qwen3_0.6b"]).trainer.policy.optimizer
    assert (own.lr, own.warmup_steps, own.scheduler, own.schedule_steps) == (1e-6, 0, "constant", None)
