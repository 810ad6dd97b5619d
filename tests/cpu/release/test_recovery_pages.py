"""Every command of docs/recovery.md and docs/checkpoints.md, run one after another on one run that was killed."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.support.forks import fork_server
from tests.support.jobs import environment, left_running, wait_until
from trainer.models.tiny import TinyShape, build_tiny

ROOT = Path(__file__).parents[3]
PAGES = [(ROOT / f"docs/{name}.md").read_text() for name in ("recovery", "checkpoints")]

# Stands in for `trainer`: adds to the commands that train what makes the run small, and two steps more each time.
TRAINER = """#!/usr/bin/env bash
if [[ "$1" == train ]]; then
  echo >> calls
  set -- "$1" {small} "trainer.total_steps=$((18 + 2 * $(wc -l < calls)))" "${{@:2}}" {last}
fi
exec {trainer} "$@"
"""
SMALL = [
    "logger.plot=false",
    "trainer.device=cpu",
    "trainer.num_workers=2",
    "trainer.train_batch_size=4",
    "trainer.mini_batch_size=2",
    "trainer.val_interval=10",
    "rollout.n=2",
    "rollout.max_response_tokens=8",
    "data.train_size=10",
    "data.val_size=4",
    "reward.name=tests.support.hashed_reward:hashed",
]
LAST = ["rollout=transformers", "trainer.ray_address=processes"]  # in place of what a command of the page says


def commands() -> list[str]:
    """The lines of the shell blocks, those that go on joined."""
    blocks = [block for page in PAGES for block in re.findall(r"^```bash\n(.*?)^```", page, re.M | re.S)]
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip()]


def program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def shell(tmp_path) -> dict[str, str]:
    """The environment of a user's shell in `tmp_path`, where `trainer` is quick, and `sbatch` runs the script here."""
    model, programs = tmp_path / "model", tmp_path / "programs"
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 1, "num_heads": 2}
    build_tiny(TinyShape(**shape, num_kv_heads=1, head_dim=16), str(model))
    (programs / "forked").mkdir(parents=True)
    fork_server().write_python(programs / "forked")
    small, last = shlex.join([f"model.path={model}", *SMALL]), shlex.join(LAST)
    program(programs / "trainer", TRAINER.format(small=small, last=last, trainer=programs / "forked/trainer"))
    program(programs / "python", f'#!/bin/sh\n[ "$2" = trainer ] && shift 2 && exec {programs}/trainer "$@"\n')
    program(programs / "sbatch", '#!/bin/sh\nexec bash "$@"\n')
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return environment() | {"PATH": f"{programs}:{os.environ['PATH']}"}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_each_command_of_the_pages_works_on_a_run_that_was_killed(tmp_path, shell, marker):
    shell["TRAINER_TEST_MARKER"] = marker
    log, reached = tmp_path / "log", tmp_path / "reached"
    killed = subprocess.Popen(
        ["bash", "-c", commands()[0]],
        cwd=tmp_path,
        env=shell | {"TRAINER_FAILPOINT": f"logged,14,{reached}"},
        stdout=log.open("w"),
        stderr=subprocess.STDOUT,
    )
    saved = tmp_path / "outputs/mine/checkpoints/global_step_10"
    wait_until(lambda: (reached.exists() and saved.exists()) or killed.poll() is not None)
    assert reached.exists() and saved.exists(), log.read_text()
    killed.kill()
    killed.wait()
    wait_until(lambda: left_running(marker) == [])

    outputs: dict[str, str] = {}
    for command in commands():
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=tmp_path,
            env=shell,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}"
        outputs[command] = outputs.get(command, "") + done.stdout
        print(command, done.stdout, sep="\n")  # pytest shows it when the test fails
    again, diagnosed = outputs[commands()[0]], outputs["trainer diagnose outputs/mine"]
    assert "took over the run directory" in again and "resume verified: 4 replayed steps identical" in again
    assert "killed process (infrastructure); started again with the same command" in diagnosed
    assert left_running(marker) == []


def test_no_command_of_the_pages_is_outside_of_the_blocks():
    """A command in running text would not be run."""
    for page in PAGES:
        for text in re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", page, flags=re.M | re.S)):
            words = text.split()
            assert words[0] != "trainer" or len(words) == 2 or "…" in text, text
