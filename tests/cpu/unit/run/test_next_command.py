"""The command that continues a run."""

from __future__ import annotations

import shlex
import sys
from typing import Any

import pytest

from trainer.run.next_command import PYTHON_RUN, next_command

PYTHON = ["/usr/bin/python3", "-m"]


def score(completion: str, answer: str) -> float:
    return 0.0


score.__module__ = "__main__"  # as in a script, so it travels by value


def start(*command: str) -> dict[str, Any]:
    return {"command": list(command), "directory": "/home/me/my project"}


@pytest.fixture(autouse=True)
def program(tmp_path, monkeypatch):
    """A `trainer` on the search path."""
    (tmp_path / "trainer").write_text("")
    (tmp_path / "trainer").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ([*PYTHON, "trainer", "train", "trainer.run_name=a b"], ["train", "trainer.run_name=a b"]),
        (["/v/bin/python", "/v/bin/trainer", "sft", "--config", "my file.yaml"], ["sft", "--config", "my file.yaml"]),
        ([*PYTHON, "trainer", "train", "-m", "trainer.seed=1,2"], ["train", "-m", "trainer.seed=1,2"]),
        ([*PYTHON, "trainer", "train", "++trainer.resume_mode=null", "x=1"], ["train", "x=1"]),
        ([*PYTHON, "trainer", "train", "trainer.resume_mode=none"], ["train"]),
    ],
)
def test_it_is_the_same_command_which_resumes(command, arguments):
    shown = next_command(start(*command), {})
    where, _, rest = shown.partition(" && ")
    assert shlex.split(where) == ["cd", "/home/me/my project"]
    assert shlex.split(rest) == ["trainer", *arguments, "trainer.resume_mode=latest"]


@pytest.mark.parametrize("mode", ["trainer.resume_mode=latest", "+trainer.resume_mode=from_path"])
def test_a_command_that_resumes_stays_as_it_is(mode):
    shown = next_command(start(*PYTHON, "trainer", "train", mode, "trainer.seed=3"), {})
    assert shown.endswith(f" && trainer train {mode} trainer.seed=3")


@pytest.mark.parametrize(("given", "added"), [(["a=1", "b=2"], ""), (["b=2"], " a=null")])
def test_a_key_that_is_not_set_any_more_is_left_out_or_null_if_a_file_sets_it(given, added):
    shown = next_command(start(*PYTHON, "trainer", "train", *given), {"a": None})
    assert shown.endswith(f" && trainer train b=2 trainer.resume_mode=latest{added}")


def test_a_change_takes_the_place_of_the_key_in_the_command():
    command = start(*PYTHON, "trainer", "train", "trainer.run_dir=old", "+trainer.excluded_nodes=[a]", "x=1")
    shown = next_command(command, {"trainer.run_dir": "/new", "trainer.excluded_nodes": "[a,b]"})
    assert shown.endswith(
        "trainer train x=1 trainer.resume_mode=latest trainer.run_dir=/new 'trainer.excluded_nodes=[a,b]'"
    )


def test_without_the_program_on_the_search_path_python_is_named(monkeypatch):
    monkeypatch.setenv("PATH", "")
    shown = next_command(start(*PYTHON, "trainer", "sft"), {})
    assert shown.endswith(f" && {sys.executable} -m trainer sft trainer.resume_mode=latest")


def test_a_run_from_python_is_called_again():
    """The process of such a run waits for a pickle on stdin."""
    child = start(*PYTHON, PYTHON_RUN, "algorithm=ppo", "trainer.run_name=it's")
    overrides = """['algorithm=ppo', "trainer.run_name=it's", 'trainer.resume_mode=latest']"""
    call = f"in Python, in '/home/me/my project': the same call of trainer.train, with the overrides {overrides}"
    assert next_command(child, {}) == call
    passed = [*child["command"], "reward.name=[passed_functions.reward_0:score,gsm8k]"]
    assert next_command({**child, "command": passed}, {}) == call, "functions are passed again"


def test_a_hidden_secret_is_to_be_written_again():
    shown = next_command(start(*PYTHON, "trainer", "train", "reward.url=http://x?key=***"), {})
    assert shown.endswith(" (write what *** hides)")
