"""`trainer plan`."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tests.support.forks import run_forked
from tests.support.jobs import environment


def plan(cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return run_forked("trainer", ["plan", *words], cwd, environment(), 300)


def test_a_plan_is_printed_as_text_and_json(tmp_path):
    shared = ["model=qwen3_0.6b", "plan.gpus=8xH100", "trainer.num_workers=4", "rollout.num_engines=4"]
    done = plan(tmp_path, *shared)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("It fits 8 H100, takes 8 of 8 GPUs: ")
    done = plan(tmp_path, *shared, "--json")
    assert json.loads(done.stdout)["gpus"] == 8


def test_the_json_of_a_run_that_does_not_fit_names_the_larger_cluster(tmp_path):
    one = ["data=gsm8k", "model.path=Qwen/Qwen3-8B", "rollout.colocate=true", "trainer.offload=all"]
    done = plan(tmp_path, *one, "plan.gpus=1xRTX4090", "--json")
    found = json.loads(done.stdout)
    assert not found["fits"] and found["changes"] == {}
    larger, changes = found["larger_cluster"], found["larger_changes"]
    assert (larger["per_node"], larger["device"]) == (1, "RTX4090") and larger["nodes"] > 1
    assert f"; it fits {larger['nodes']} nodes of 1 RTX4090 with " in found["verdict"]
    assert all(f" {key}=" in found["verdict"] for key in changes) and changes
    assert any("data sheets" in note for note in found["notes"])


def test_overrides_that_training_refuses_are_refused(tmp_path):
    done = plan(tmp_path, "trainer.task=sft", "rollout.n=4", "plan.gpus=8xH100")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: rollout.n: trainer.task=sft does not read it, so leave it out")


def test_a_cluster_that_is_not_known_is_one_sentence(tmp_path):
    done = plan(tmp_path, "plan.gpus=8xV100")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: plan.gpus=8xV100: the GPU V100 is not known; choose one of ")
    assert done.stderr.count("\n") == 1
