"""How functions travel from the caller of `train` to the processes of the run."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from tests.support.jobs import environment
from trainer.api.running import describe_function
from trainer.api.worker_main import write_functions
from trainer.errors import UserError
from trainer.rewards.functions import gsm8k

WORTH = {"e": 2.0}


class Scale:
    """A reward with a setting."""

    def __init__(self, factor):
        self.factor = factor

    def __call__(self, completion, answer):
        return self.factor * len(completion)


def test_a_function_of_a_module_goes_by_its_import_path():
    assert describe_function("reward", gsm8k) == ("trainer.rewards.functions:gsm8k", None)


def test_a_name_is_passed_as_it_is():
    assert describe_function("reward", "math") == ("math", None)


def test_other_functions_are_pickled_under_a_stable_import_path():
    path, data = describe_function("reward", lambda completion, answer: 1.0)
    assert path == "passed_functions.reward:reward" and data

    def score(completion, answer):
        return 1.0

    assert describe_function("reward", score)[0] == "passed_functions.reward:score"
    assert describe_function("reward", Scale(2))[0] == "passed_functions.reward:reward"


def test_a_class_travels_as_a_function_does():
    assert describe_function("environment", Scale) == (f"{__name__}:Scale", None)
    inner = type("World", (), {"__module__": "__main__"})
    path, data = describe_function("environment", inner)
    assert path == "passed_functions.environment:World" and data


def test_another_process_imports_a_pickled_function_with_what_it_refers_to(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    bonus = 0.5

    def score(completion, answer):
        return WORTH["e"] * completion.count("e") + bonus

    path, data = describe_function("reward", score)
    write_functions(str(tmp_path), {"reward": ("score", data)})
    code = (
        f"from trainer.import_utils import import_function; print(import_function({path!r}, 'reward.name')('eel', ''))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300, env=environment()
    )
    assert done.stdout == "4.5\n", done.stderr


def test_functions_of_two_starts_do_not_replace_one_another(tmp_path, monkeypatch):
    """A second start in the directory of a running job is refused, and must not change the job's reward."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "")
    for number in (1.0, 2.0):
        write_functions(str(tmp_path), {"reward": ("reward", describe_function("reward", Scale(number))[1])})
    assert len(list(tmp_path.glob("functions/*/passed_functions/reward.pkl"))) == 2


@pytest.mark.parametrize("kind", ["written", "lock"])
def test_a_function_that_holds_a_file_to_write_or_a_lock_is_refused(kind, tmp_path):
    with open(tmp_path / "log", "w") as written:
        held = {"written": written, "lock": threading.Lock()}[kind]
        _refuse_to_send(held)


def _refuse_to_send(held):
    def score(completion, answer):
        return float(held is not None)

    with pytest.raises(UserError, match=r"reward=score: other processes cannot get this function \(\w+: [Cc]annot"):
        describe_function("reward", score)


def test_what_is_no_function_is_refused():
    with pytest.raises(UserError, match="reward: must be a function or the name of one, not float"):
        describe_function("reward", 1.0)
