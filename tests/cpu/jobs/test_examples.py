"""The commands of examples/README.md: those for CPU run as a user gives them, with `experiment=smoke`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.forks import fork_server
from tests.support.jobs import environment, left_running, metrics

ROOT = Path(__file__).parents[3]
COMMANDS = re.findall(
    r"`((?:bash examples/|python -m trainer\.)[^`]*)` \|$", (ROOT / "examples/README.md").read_text(), re.M
)
ON_GPUS = [command for command in COMMANDS if "experiment=" in command]
ON_CPU = [command for command in COMMANDS if command not in ON_GPUS]
# Plain processes and transformers start sooner, and few supervised steps are enough for rewards that differ.
QUICK = ["rollout=transformers", "trainer.ray_address=processes", "logger.plot=false"]


@pytest.mark.slow
@pytest.mark.parametrize("command", ON_CPU, ids=lambda command: re.split(r"[ /]", command)[-1])
def test_a_smoke_run_of_an_example_has_rewards_that_differ_in_a_directory_of_its_own(command, tmp_path, marker):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    programs = tmp_path / "programs"
    programs.mkdir()
    fork_server().write_python(programs)
    path = f"{programs}:{os.environ['PATH']}"
    supervised_steps = 120 if "rejection" in command else 60  # there, some completions must be right
    arguments = [*command.split(), "experiment=smoke", *QUICK, f"sft.steps={supervised_steps}"]
    done = subprocess.run(
        arguments, cwd=tmp_path, env=environment() | {"PATH": path}, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert left_running(marker) == []
    assert [entry.name for entry in (tmp_path / "outputs").iterdir()] == ["smoke"]
    (directory,) = (tmp_path / "outputs/smoke").iterdir()
    runs = [metrics(file.parent) for file in directory.rglob("metrics.jsonl")]
    steps = [row for rows in runs for row in rows if "reward/std" in row]
    assert len(steps) >= 2 and all(row["reward/std"] > 0 and row.get("reward/failures", 0) == 0 for row in steps)
    if "lora" in command:
        (adapter,) = directory.glob("adapters/*")
        assert adapter.name == "global_step_2" and (adapter / "adapter_model.safetensors").exists()
    if "rejection" in command:
        (learnt,) = [rows for rows in runs if "sft/clip_frac" in rows[-1]]
        assert learnt[-1]["step"] == supervised_steps


@pytest.mark.parametrize("command", ON_GPUS, ids=lambda command: command.split()[-2])
def test_without_a_gpu_a_preset_for_gpus_ends_with_a_sentence_that_says_so(command, tmp_path):
    arguments = [sys.executable, *command.split()[1:]]
    done = subprocess.run(arguments, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stdout + done.stderr
    assert re.fullmatch(r"error: .*more ranks than CUDA devices, this machine has 0.*\n", done.stderr)
