"""Environments are checked and tried before the start, in the interpreter in which they will run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from trainer.config import EnvironmentConfig
from trainer.environments.base import check_options
from trainer.errors import UserError
from trainer.sources.trials import try_environment

OWN = """
import clashing

class Own:
    @classmethod
    def check_options(cls, size=1, note=""):
        with open("/proc/self/cmdline") as command:
            assert not note or note not in command.read()
        if size < 1:
            raise ValueError(f"size={size} is too small")

    def __init__(self, size=1, note=""):
        self.size = size

    def reset(self, row, seed):
        return [{"role": "user", "content": clashing.VERSION}]

    def step(self, reply):
        from trainer.environments import StepResult
        return StepResult(reward=float(len(reply["content"])), done=True)

    def close(self):
        pass
"""


pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch) -> None:
    (tmp_path / "own_environment.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)


def test_what_cannot_run_is_refused_in_one_sentence():
    def refused(name: str = "own_environment:Own", **kwargs: int) -> str:
        with pytest.raises(UserError) as error:
            check_options(name, kwargs)
        assert "\n" not in str(error.value)
        return str(error.value)

    assert "No module named 'clashing'" in refused()
    assert "unexpected keyword argument 'tires'" in refused("tests.support.retry:RetryEnv", tires=3)
    assert "; it takes tries, again, prompt_key, answer_key, set by +environment.kwargs.NAME=VALUE" in refused(
        "tests.support.retry:RetryEnv", tires=3
    )


COUNTED = """
import os
import time

class Counted:
    def __init__(self, calls, fails_in="", **how):
        self.calls, self.fails_in, self.how = calls, fails_in, how
        self.note("__init__")

    def note(self, method):
        with open(self.calls, "a") as file:
            file.write(method + " ")
        with open(self.calls) as file:
            count = file.read().split().count(method)
        if method == self.fails_in and count <= self.how.get("times", count):
            if "seconds" in self.how:
                time.sleep(self.how["seconds"])
            elif "status" in self.how:
                os._exit(self.how["status"])
            elif "refused" in self.how:
                raise ConnectionRefusedError("Connection refused")
            else:
                raise KeyError("price")

    def reset(self, row, seed):
        self.note("reset")
        return [{"role": "user", "content": row["prompt"]}] if "empty" not in self.how else []

    def step(self, reply):
        from trainer.environments import StepResult
        with open(self.calls + ".replies", "a") as file:
            file.write(reply["content"] + "|")
        self.note("step")
        value = (self.how.get("step") or {"done": True})
        return StepResult(**value) if isinstance(value, dict) else value

    def close(self):
        self.note("close")
"""


@pytest.fixture
def calls(tmp_path) -> Path:
    (tmp_path / "counted.py").write_text(COUNTED)
    return tmp_path / "calls"


def tried(
    calls: Path, row: dict[str, object], max_error_rate: float = 0.5, timeout_s: float = 5.0, rows: int = 1, **kwargs
) -> str:
    """Try the environment; return its calls."""
    given = {"calls": str(calls), **kwargs}
    config = EnvironmentConfig("counted:Counted", given, max_error_rate=max_error_rate, timeout_s=timeout_s)
    calls.write_text("")
    try:
        try_environment(config, [row] * rows, 1, "answer")
    finally:
        assert not [name for name in sys.modules if name == "counted"], "user code has run in this process"
    return calls.read_text().strip()


def test_an_environment_that_works_is_made_reset_stepped_and_closed_once(calls):
    for answer, reply in (("four", "four"), (4, "no answer"), ("", "no answer")):
        assert tried(calls, {"prompt": "?", "answer": answer}) == "__init__ reset step close"
        assert Path(f"{calls}.replies").read_text().split("|")[-2] == reply


def test_an_environment_that_fails_is_refused_after_one_call(calls):
    for kwargs, row, reason, made in [
        (
            {"fails_in": "__init__"},
            {"prompt": "?"},
            r"reset was not called, because __init__ raised KeyError: 'price' "
            r"in counted.py:\d+",
            "__init__",
        ),
        (
            {"fails_in": "reset"},
            {"prompt": "?"},
            r"reset raised KeyError: 'price' in counted.py:\d+",
            "__init__ reset close",
        ),
        ({}, {}, r"reset raised KeyError: 'prompt' in counted.py:\d+", "__init__ reset close"),
        (
            {"empty": True},
            {},
            r"reset returned a wrong value \(in counted.py:\d+\): there is no message",
            "__init__ reset close",
        ),
        ({"fails_in": "reset", "status": 5}, {"prompt": "?"}, "reset ended its process .*5.*", "__init__ reset"),
        (
            {"step": [1, 2, 3]},
            {"prompt": "?"},
            r"step returned a wrong value \(in counted.py:\d+\): it must be a "
            r"trainer.environments.StepResult\(messages, reward, done\), not list",
            "__init__ reset step close",
        ),
        (
            {"step": {"done": True, "reward": "one"}},
            {"prompt": "?"},
            r"step returned a wrong value \(in counted.py:\d+\): reward is a str, which is not a number",
            "__init__ reset step close",
        ),
    ]:
        usual = "`step` returns a StepResult for every reply"
        usual = usual if "step" in made else "`reset` returns the first messages for every row"
        sentence = rf"environment.name=counted:Counted: fails for the first row of the data \({reason}\); {usual}"
        with pytest.raises(UserError, match=f"^{sentence}$"):
            tried(calls, row, **kwargs)
        assert calls.read_text().strip() == made


def test_an_environment_that_fails_now_and_then_keeps_no_job_from_its_start(calls):
    made = tried(calls, {"prompt": "?"}, fails_in="reset", times=2, rows=3)
    assert made == "__init__ reset close __init__ reset close __init__ reset step close"
    reason = r"\(reset raised KeyError: 'price' in counted.py:\d+\)"
    with pytest.raises(UserError, match=rf"fails for the first row of the data, and for the 2 after it {reason}; "):
        tried(calls, {"prompt": "?"}, fails_in="reset", rows=3)


@pytest.mark.parametrize(
    ("how", "reason"), [({}, "step raised KeyError: 'price' in counted.py:"), ({"status": 5}, "ended its process")]
)
def test_a_step_that_fails_for_the_reply_of_the_trial_gives_a_warning(calls, caplog, how, reason):
    """Another reply may be right: the environment may ask for a form."""
    tried(calls, {"prompt": "?"}, fails_in="step", rows=3, **how)
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert line.startswith("environment.name=counted:Counted: fails for the reply 'no answer' to a row of the data (")
    assert reason in line and calls.read_text().split().count("__init__") == 1


@pytest.mark.parametrize("method", ["reset", "step"])
def test_an_environment_whose_service_is_not_there_says_so(calls, method):
    sentence = rf"{method} raised ConnectionRefusedError: .*\); start the service that it asks, or "
    with pytest.raises(UserError, match=sentence):
        tried(calls, {"prompt": "?"}, fails_in=method, refused=True)


def test_a_slow_environment_and_one_that_may_fail_are_no_reason_not_to_start(calls, caplog):
    tried(calls, {"prompt": "?"}, timeout_s=3, fails_in="reset", seconds=60)
    tried(calls, {"prompt": "?"}, max_error_rate=1.0, fails_in="reset")
    start = "environment.name=counted:Counted: fails for the first row of the data: "
    slow, failing = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert slow == f"{start}reset took longer than environment.timeout_s=3"
    assert failing.startswith(f"{start}reset raised KeyError: 'price' in counted.py:")
