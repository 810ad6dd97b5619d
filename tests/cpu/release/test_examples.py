"""The commands of examples/README.md: those for CPU run as a user gives them, with `experiment=smoke`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest

from tests.support.forks import fork_server
from tests.support.jobs import environment, left_running, metrics
from tests.support.judges import Answer, Server, serving

ROOT = Path(__file__).parents[3]
COMMANDS = re.findall(r"`((?:bash examples/|trainer )[^`]*)` \|$", (ROOT / "examples/README.md").read_text(), re.M)
ON_GPUS = [command for command in COMMANDS if "experiment=" in command]
ON_CPU = [command for command in COMMANDS if command not in ON_GPUS]
# Plain processes and transformers start sooner, and few supervised steps are enough for rewards that differ.
QUICK = ["rollout=transformers", "trainer.ray_address=processes", "logger.plot=false"]


def run_smoke(
    command: str, cwd: Path, marker: str, supervised_steps: int, **env: str
) -> tuple[Path, list[list[dict[str, Any]]]]:
    """Run an example to its end. Returns its directory and the metrics of its runs, in which the rewards differ."""
    (cwd / "examples").symlink_to(ROOT / "examples")
    programs = cwd / "programs"
    programs.mkdir()
    fork_server().write_python(programs)
    env |= {"PATH": f"{programs}:{os.environ['PATH']}"}
    arguments = [*command.split(), "experiment=smoke", *QUICK, f"sft.steps={supervised_steps}"]
    done = subprocess.run(arguments, cwd=cwd, env=environment() | env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert left_running(marker) == []
    assert [entry.name for entry in (cwd / "outputs").iterdir()] == ["smoke"]
    (directory,) = (cwd / "outputs/smoke").iterdir()
    runs = [metrics(file.parent) for file in directory.rglob("metrics.jsonl")]
    steps = [row for rows in runs for row in rows if "reward/std" in row]
    assert len(steps) >= 2 and all(row["reward/std"] > 0 and row.get("reward/failures", 0) == 0 for row in steps)
    return directory, runs


JUDGED = "bash examples/llm_judge/run.sh"


def graded(_: Server, request) -> Answer:
    """Grades of a judge that differ from completion to completion, and are the same when a step is repeated."""
    grade = zlib.crc32(request["messages"][0]["content"].encode()) % 11
    return 200, {}, json.dumps({"choices": [{"message": {"role": "assistant", "content": str(grade)}}]}).encode()


@pytest.mark.slow
def test_a_smoke_run_of_the_example_with_a_judge_learns_from_its_grades(tmp_path, marker):
    with serving(graded) as server:
        judge = {"JUDGE_BASE_URL": f"{server.url}/v1", "JUDGE_MODEL": "wise", "JUDGE_API_KEY": "secret-key"}
        directory, runs = run_smoke(JUDGED, tmp_path, marker, 2, **judge)
        assert {request["model"] for request in server.requests} == {"wise"}
        assert {headers["Authorization"] for headers in server.headers} == {"Bearer secret-key"}
    assert len(runs) == 1
    files = [file for file in directory.rglob("*") if file.is_file()]
    assert not any(b"secret-key" in file.read_bytes() for file in files)


@pytest.mark.slow
@pytest.mark.parametrize("command", ON_CPU, ids=lambda command: re.split(r"[ /]", command)[-1])
def test_a_smoke_run_of_an_example_has_different_rewards_and_a_separate_directory(command, tmp_path, marker):
    supervised_steps = 200 if "rejection" in command else 60  # there, some completions must be right on every machine
    directory, runs = run_smoke(command, tmp_path, marker, supervised_steps)
    if "lora" in command:
        (adapter,) = directory.glob("adapters/*")
        assert adapter.name == "global_step_2" and (adapter / "adapter_model.safetensors").exists()
    if "rejection" in command:
        (learnt,) = [rows for rows in runs if "sft/clip_frac" in rows[-1]]
        assert learnt[-1]["step"] == supervised_steps


def test_without_a_gpu_a_preset_for_gpus_is_refused(tmp_path):
    arguments = [sys.executable, "-m", *ON_GPUS[0].split()]
    done = subprocess.run(arguments, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 2, done.stdout + done.stderr
    assert re.fullmatch(r"error: .*torch finds no CUDA device on this machine; .*\n", done.stderr)
