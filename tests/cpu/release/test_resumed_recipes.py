"""The commands of the recipes of deploy/: their machine is lost, and a new one continues the run."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.buckets import make_bucket, use_s3
from tests.support.forks import fork_server
from tests.support.jobs import comparable, environment, metrics, run_forked_job, wait_until
from tests.support.recipes import KUBERAY, SKYPILOT, compose_words, read_yaml
from trainer.models.tiny import TinyShape, build_tiny

STEPS = 3
TINY = [
    "model=tiny",
    "data=reverse_text",
    "data.train_size=16",
    "data.val_size=4",
    "rollout=transformers",
    "rollout.n=2",
    "rollout.max_response_tokens=8",
    "rollout.num_engines=1",
    "reward.name=tests.support.hashed_reward:hashed",
    "logger.plot=false",
    "trainer.device=cpu",
    "trainer.num_workers=1",
    "trainer.min_world_size=1",
    "trainer.train_batch_size=4",
    "trainer.mini_batch_size=2",
    "trainer.ckpt_interval=1",
    f"trainer.val_interval={STEPS}",
    f"trainer.total_steps={STEPS}",
]
"""What makes the run of a recipe small enough for one machine without a GPU."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> list[str]:
    """`TINY`, with a model that is there."""
    path = tmp_path_factory.mktemp("model") / "model"
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 1, "num_heads": 2}
    build_tiny(TinyShape(**shape, num_kv_heads=1, head_dim=16), str(path))
    return [*TINY, f"model.path={path}"]


@pytest.fixture(scope="module")
def uninterrupted(tiny, tmp_path_factory) -> list[dict[str, Any]]:
    """The metrics of the small run on a machine that is not lost."""
    directory = tmp_path_factory.mktemp("uninterrupted")
    done = run_forked_job(*tiny, "trainer.run_dir=run", cwd=directory)
    assert done.returncode == 0, done.stdout + done.stderr
    return comparable(metrics(directory / "run"))


def runs(words: list[str]) -> tuple[str, dict[str, str]]:
    """The command of the trainer of Compose, whose bucket is `runs`, and no variables. It has an engine of its own."""
    given = compose_words("trainer", OVERRIDES=shlex.join([*words, "rollout.engine=transformers", "rollout.urls=[]"]))
    return shlex.join(["trainer", *given]), {}


def kuberay(words: list[str]) -> tuple[str, dict[str, str]]:
    """The entry point of the RayJob with more words, and no variables."""
    entrypoint = read_yaml(KUBERAY)["spec"]["entrypoint"].replace("BUCKET", "kuberay")
    return f"{entrypoint} {shlex.join(words)}", {}


def skypilot(words: list[str]) -> tuple[str, dict[str, str]]:
    """The script of the task, and the variables of its only node, whose overrides are the words."""
    task = read_yaml(SKYPILOT)
    node = {"SKYPILOT_NODE_IPS": "127.0.0.1", "SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_NODES": "1"}
    node |= {"SKYPILOT_NUM_GPUS_PER_NODE": "1", "RAY_AUTH_TOKEN": "0" * 64}
    return task["run"], {**task["envs"], **node, "BUCKET": "s3://skypilot", "OVERRIDES": shlex.join(words)}


@pytest.fixture
def programs(tmp_path) -> Path:
    """A directory with `trainer`, which starts quickly, and a stand-in for `ray`: the ranks are there without Ray."""
    path = tmp_path / "programs"
    path.mkdir()
    fork_server().write_python(path)
    (path / "ray").write_text('#!/bin/sh\n[ "$1" = health-check ] || exec sleep 600\n')
    (path / "ray").chmod(0o755)
    return path


def start(script: str, directory: Path, variables: Mapping[str, str]) -> subprocess.Popen:
    """Run a script in a directory of its own, which stands for the disk of a machine."""
    (directory / ".venv/bin").mkdir(parents=True)
    (directory / ".venv/bin/activate").touch()
    return subprocess.Popen(
        ["bash", "-c", script], cwd=directory, env={**environment(), **variables}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip


@pytest.mark.parametrize(("recipe", "folder"), [(runs, "one"), (kuberay, "runs/one"), (skypilot, "runs/one")])
def test_the_command_of_a_recipe_continues_the_run_on_a_new_machine(
    recipe, folder, tiny, uninterrupted, programs, tmp_path, monkeypatch, s3_url
):
    """The machine dies when step 2 is saved. All that the next one has is the command and the bucket."""
    use_s3(monkeypatch, s3_url)
    bucket, reached = make_bucket(recipe.__name__), tmp_path / "reached"
    script, variables = recipe([*tiny, "trainer.ray_address=processes"])
    variables["PATH"] = f"{programs}:{os.environ['PATH']}"
    first = start(script, tmp_path / "first", variables | {"TRAINER_FAILPOINT": f"save:published,2,{reached}"})
    wait_until(lambda: reached.exists() or first.poll() is not None)
    assert reached.exists(), first.communicate()[0]
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    second = start(script, tmp_path / "second", variables)
    output, _ = second.communicate()
    assert second.returncode == 0, output
    assert f"resumed from {bucket}/{folder}/global_step_2" in output, output
    assert comparable(metrics(tmp_path / "second/outputs/one")) == uninterrupted
