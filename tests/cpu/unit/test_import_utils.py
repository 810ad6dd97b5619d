"""Functions of the user's, whose modules may do anything when they are imported."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from tests.support.jobs import wait_until
from trainer.algorithms import ADVANTAGES, POLICY_LOSSES
from trainer.algorithms import resolve as resolve_function
from trainer.errors import UserError
from trainer.import_utils import digest_code, import_function
from trainer.process.signals import SIGNALS, Stopped
from trainer.rewards import resolve as resolve_reward

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise KeyboardInterrupt", "KeyboardInterrupt)"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("raise GeneratorExit", "GeneratorExit)"),
        ("class E(Exception):\n    def __str__(self): raise SystemExit\nraise E", "E: its text cannot be read"),
        ("raise ValueError('a\\n' * 20_000_000)", "ValueError: a a a"),
    ],
)
def test_a_module_that_raises_at_import_is_refused_in_one_line(tmp_path, monkeypatch, code, reason):
    (tmp_path / "raising.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    with pytest.raises(UserError) as caught:
        import_function("raising:f", "data.curriculum")
    message = str(caught.value)
    assert message.startswith(f"data.curriculum=raising:f: cannot be imported ({reason}")
    assert len(message) < 400
    assert message.isprintable()


def test_a_signal_during_an_import_stops_the_run(tmp_path, monkeypatch):
    (tmp_path / "signalled.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    with SIGNALS.listening(), pytest.raises(Stopped, match=signal.SIGTERM.name):
        import_function("signalled:f", "data.curriculum")


IMPORT_PATH_KEYS = {
    "algorithm.policy_loss": lambda name: resolve_function(POLICY_LOSSES, name, "algorithm.policy_loss"),
    "algorithm.advantage_estimator": lambda name: resolve_function(ADVANTAGES, name, "algorithm.advantage_estimator"),
    "reward.name": resolve_reward,
    "data.curriculum": lambda name: import_function(name, "data.curriculum"),
}


@pytest.mark.parametrize("key", IMPORT_PATH_KEYS)
def test_an_import_path_without_a_colon_is_refused_with_the_right_form(key):
    with pytest.raises(UserError) as caught:
        IMPORT_PATH_KEYS[key]("os.path.join")
    assert str(caught.value) == (
        f"{key}=os.path.join: an import path has a colon before the function; write os.path:join"
    )
    assert IMPORT_PATH_KEYS[key]("os.path:join") is os.path.join


@pytest.mark.parametrize("path", ["plain", ":f", "module:", ".f", "module.", ":"])
def test_other_text_is_no_import_path(path):
    with pytest.raises(UserError, match=f"^data.curriculum={path}: must be an import path package.module:function$"):
        import_function(path, "data.curriculum")


@pytest.mark.parametrize(
    "path, name", [("mine.py:f", "mine:f"), ("./mine.py:f", "mine:f"), ("lib/mine.py:f", "lib.mine:f")]
)
def test_a_path_of_a_file_is_refused_with_the_name_of_the_module(path, name):
    with pytest.raises(UserError, match=f"^reward.name={path}: .* not a file; write {name} "):
        import_function(path, "reward.name")


@pytest.mark.parametrize(
    "path, sentence",
    [
        ("own_rewards:Scoer", "own_rewards has no class Scoer; did you mean Scorer?"),
        ("own_rewards:scor", "has no function scor; did you mean score, or Scorer?"),
        ("own_rewards:_hiden", "own_rewards has no function _hiden"),
        ("own_rewards:LIMIT", "own_rewards has no LIMIT"),
        ("own_rewrads:score", "(ModuleNotFoundError: No module named 'own_rewrads'), neither"),
        ("importing:score", "(ModuleNotFoundError: No module named 'own_rewrads'), neither"),
    ],
)
def test_a_misspelt_function_or_class_gets_a_suggestion(path, sentence, tmp_path, monkeypatch):
    (tmp_path / "own_rewards.py").write_text("class Scorer: pass\ndef score(): pass\ndef _hidden(): pass\nLIMIT = 3\n")
    (tmp_path / "importing.py").write_text("import own_rewrads\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    with pytest.raises(UserError) as caught:
        import_function(path, "reward.name")
    assert str(caught.value).startswith(f"reward.name={path}: ") and sentence in str(caught.value)


@pytest.mark.parametrize(
    "path", ["grpo", "a sentence: with a colon", "missing_module:x", "raising.inner:x", "sys:argv"]
)
def test_what_names_no_file_has_no_digest(tmp_path, monkeypatch, path):
    (tmp_path / "raising").mkdir()
    (tmp_path / "raising/__init__.py").write_text("import sys; sys.exit(3)")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert digest_code(path) == ""


def test_an_installed_function_stands_for_its_file_and_version():
    assert digest_code("numpy:mean") != digest_code("numpy.linalg:norm") and digest_code("numpy:mean")


THREADS = """
import os, signal
from trainer.import_utils import import_function
import_function("with_numpy:mine", "data.curriculum")
masks = {}
for thread in os.listdir("/proc/self/task"):
    with open(f"/proc/self/task/{thread}/status") as file:
        blocked = next(int(line.split()[1], 16) for line in file if line.startswith("SigBlk"))
    masks[int(thread)] = bool(blocked >> signal.SIGTERM - 1 & 1)
assert not masks.pop(os.getpid()) and all(masks.values()), masks
"""


def test_the_threads_of_a_library_that_a_module_imports_get_no_signals(tmp_path):
    """They are older than Ray, whose handler would end the process while Ray starts."""
    (tmp_path / "with_numpy.py").write_text("import numpy\ndef mine(): ...\n")
    environment = {
        **os.environ,
        "OPENBLAS_NUM_THREADS": "2",
        "OMP_NUM_THREADS": "2",
        "PYTHONPATH": f"{tmp_path}:{ROOT}",
    }
    done = subprocess.run([sys.executable, "-c", THREADS], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


# A process of rewards begins with such code.
SHADOWED = """
import subprocess, sys
from trainer.import_utils import import_function
assert import_function("mine:reward", "reward.name")() == 1.0
code = f"import sys; sys.path[:] = {sys.path!r}; import trainer.errors, json, mine; "
code += "print(json.loads('2') + mine.reward())"
print(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
"""


def test_modules_of_the_working_directory_are_found_and_hide_no_others(tmp_path):
    (tmp_path / "mine.py").write_text("def reward(): return 1.0\n")
    for name in ("trainer", "json"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('a file of the user')\n")
    done = subprocess.run(
        [sys.executable, "-P", "-c", SHADOWED], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.strip() == "3.0", done.stderr


STARTS = """
from trainer.config.command_line import Outcome
from trainer.import_utils import import_function
from trainer.process.signals import SIGNALS
SIGNALS.listen()  # as every command does
print(import_function("mine:pid", "reward.name")(), flush=True)
Outcome(0).exit()
"""


def test_what_a_module_starts_when_it_is_imported_ends_with_the_job(tmp_path):
    code = """
        import subprocess
        server = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        def pid(): return server.pid
    """
    (tmp_path / "mine.py").write_text(textwrap.dedent(code))
    done = subprocess.run([sys.executable, "-c", STARTS], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    with contextlib.suppress(psutil.NoSuchProcess):
        server = psutil.Process(int(done.stdout))
        wait_until(lambda: server.status() == psutil.STATUS_ZOMBIE)  # or it is gone
