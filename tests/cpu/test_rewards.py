"""Reward functions, and the pool in which a bad one costs one completion."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.errors import UserError, WorkerError
from trainer.rewards import REWARDS, resolve
from trainer.rewards.pool import RewardPool

GSM8K = Path(__file__).resolve().parents[2] / "../shared/data/gsm8k"
gsm8k, math = REWARDS["gsm8k"], REWARDS["math"]


# gsm8k


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("#### 72", "#### 72"),
        ("####72", "72"),
        ("She sold 48+24=72.\n#### 72\n", "48+24 = <<48+24=72>>72 clips.\n#### 72"),
        ("#### 72.00", "72"),
        ("#### 72.", "72"),
        ("#### 072", "72"),
        ("#### 1,234", "1234"),
        ("#### 1234", "1,234"),
        ("#### 1,234,567.50", "1234567.5"),
        ("#### $72", "72"),
        ("#### $ 72", "72"),
        ("#### US$1,000", "1000"),
        ("#### 72€", "72"),
        ("#### 72 dollars", "72"),
        ("#### 72km in 3 hours", "72"),
        ("#### 5%", "5"),
        ("#### .5", "0.5"),
        ("#### -5", "-5"),
        ("#### −5", "-5"),
        ("#### -$5", "-5"),
        ("#### $-5", "-5"),
        ("#### **72**", "72"),
        ("#### \\boxed{72}", "72"),
        ("#### The answer is 72, not 70", "72"),
        ("#### 1\nno, wait\n#### 72", "72"),
        ("The answer is 72.", "72"),
        ("First 24, then 48, so 72 clips", "72"),
        ("10-3=7", "7"),
        ("5 apples for her\n- 18 for him", "18"),
        ("from 10-18", "18"),
        ("x=-5", "-5"),
        ("(72)", "72"),
        ("72 m^2", "72"),
        ("an area of 72 m^12.", "72"),
        ("1, 2, 3", "3"),
        ("1,2,3", "3"),
    ],
)
def test_gsm8k_accepts(completion, answer):
    assert gsm8k(completion, answer) == 1.0


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("#### 73", "#### 72"),
        ("#### 72.5", "72"),
        ("#### -72", "72"),
        ("#### 7", "72"),
        ("#### 720", "72"),
        ("72 it is\n#### 73", "72"),
        ("#### 72\n#### 73", "72"),
        ("72 ####", "72"),
        ("72, or rather 73", "72"),
        ("#### seventy-two", "72"),
        ("no number", "72"),
        ("", "72"),
        ("", "none either"),
        ("#### ", "####"),
    ],
)
def test_gsm8k_refuses(completion, answer):
    assert gsm8k(completion, answer) == 0.0


@settings(deadline=None)  # the machine may be busy
@given(
    number=st.integers(-(10**12), 10**12),
    marker=st.sampled_from(["", "#### "]),
    before=st.text(alphabet="abc 123.\n", max_size=20),
    after=st.sampled_from(["", ".", " dollars", "%", " km.", "\n"]),
    write=st.sampled_from([str, "{:,}".format, "${}".format, "{}.00".format, "${:,}".format, " {}".format]),
)
def test_gsm8k_reads_any_number_as_written(number, marker, before, after, write):
    completion = f"{before}\n{marker}{write(number)}{after}"
    assert gsm8k(completion, str(number)) == 1.0
    assert gsm8k(completion, str(number + 1)) == 0.0


@settings(deadline=None)  # the machine may be busy
@given(st.text(), st.text())
def test_gsm8k_takes_any_text(completion, answer):
    assert gsm8k(completion, answer) in (0.0, 1.0)


@pytest.mark.parametrize("split", ["train", "test"])
def test_gsm8k_knows_every_reference_answer(split):
    if not GSM8K.exists():
        pytest.skip("the GSM8K files are not beside this checkout")
    answers = [json.loads(line)["answer"] for line in (GSM8K / f"{split}.jsonl").read_text().splitlines()]
    assert len(answers) == {"train": 7473, "test": 1319}[split]
    for answer in answers:
        solution, number = answer.split("####")
        changed = int(number.replace(",", "")) + 1
        assert gsm8k(answer, answer) == 1.0
        assert gsm8k(f"The answer is ${number.strip()}.", answer) == 1.0
        assert gsm8k(f"{solution}#### {changed}", answer) == 0.0
        assert gsm8k(f"The answer is {changed:,}", answer) == 0.0


# math


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        (r"so it is \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{0.5}", r"\frac{1}{2}"),
        (r"\boxed{1/2}", r"$\frac{1}{2}$"),
        (r"\boxed{\dfrac12}", r"\boxed{\frac{1}{2}}"),
        (r"\boxed{2\sqrt{2}}", r"\sqrt{8}"),
        (r"\boxed{1+x^2}", "x^2+1"),
        ("$x^2+1$", "x^2+1"),
        ("x^2+1", "x^2+1"),
        (r"\boxed{x=5}", "5"),
        (r"\boxed{1,234}", "1234"),
        (r"\boxed{(1,2)}", "(1,2)"),
        (r"\boxed{\$5}", r"\$5"),
        ("The answer is 5.", "5"),
    ],
)
def test_math_accepts(completion, answer):
    assert math(completion, answer) == 1.0


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        (r"\boxed{\frac{1}{3}}", r"\frac{1}{2}"),
        (r"\boxed{x^2-1}", "x^2+1"),
        (r"\boxed{6}", "5"),
        (r"\boxed{}", "5"),
        (r"\boxed{\frac{1}{", "5"),
        ("no mathematics", "5"),
        ("\x00}{$$\\frac", "5"),
        ("", ""),
    ],
)
def test_math_refuses(completion, answer):
    assert math(completion, answer) == 0.0


# arithmetic, reverse_text


@pytest.mark.parametrize(("completion", "reward"), [("7", 1.0), (" 7\n", 1.0), ("7.", 0.0), ("17", 0.0), ("", 0.0)])
def test_arithmetic_wants_the_number_alone(completion, reward):
    assert REWARDS["arithmetic"](completion, "7") == reward


def test_reverse_text_is_a_similarity():
    reward = REWARDS["reverse_text"]
    assert reward("dcba", "dcba") == 1.0
    assert reward(" dcba\n", "dcba") == 1.0
    assert reward("dcb", "dcba") == pytest.approx(2 * 3 / 7)
    assert reward("xyz", "dcba") == 0.0
    assert reward("", "dcba") == 0.0


# resolve


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gsm9k", "choose one of gsm8k, math, arithmetic, reverse_text, or an import path"),
        (":f", "choose one of"),
        ("os:", "choose one of"),
        ("no.such.module:f", "cannot be imported.*no"),
        (".relative:f", "cannot be imported"),
        ("no.such.module.f", "cannot be imported.*no"),
        ("os:no_such", "os has no function no_such"),
        ("os.no_such", "os has no function no_such"),
        ("os:name", "os has no function name"),
    ],
)
def test_unknown_rewards_are_refused(name, message):
    with pytest.raises(UserError, match=f"reward.name={name}: {message}"):
        resolve(name)


def test_import_paths_take_a_colon_or_a_dot():
    assert resolve("trainer.rewards.functions:gsm8k") is resolve("trainer.rewards.functions.gsm8k") is gsm8k


def test_a_module_with_a_mistake_is_refused(tmp_path, monkeypatch):
    (tmp_path / "mistaken_rewards.py").write_text("import os\nos.no_such\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    with pytest.raises(UserError, match="cannot be imported .AttributeError.*no_such"):
        resolve("mistaken_rewards:f")


# The pool

CUSTOM = """
import os, sys, time

time.sleep({import_s})

def reward(completion, answer):
    if completion == "raise":
        raise KeyError("oh")
    if completion == "exit":
        sys.exit(3)
    if completion == "nan":
        return float("nan")
    if completion == "text":
        return "much"
    if completion == "hang":
        time.sleep(1000)
    if completion == "pid":
        time.sleep(0.05)
        return os.getpid()
    if completion == "die":
        os._exit(7)
    return float(completion) + float(answer)
"""


@pytest.fixture
def custom(tmp_path, monkeypatch):
    """Writes a module of rewards beside where the command is given; returns its import path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])

    def write(name: str, import_s: float = 0.0) -> str:
        (tmp_path / f"{name}.py").write_text(CUSTOM.format(import_s=import_s))
        return f"{name}:reward"

    return write


def test_pool_keeps_the_order(custom):
    with RewardPool(custom("order_rewards"), timeout_s=30, num_processes=2) as pool:
        rewards, failures = pool.score([str(i) for i in range(200)], ["0.5"] * 200)
        assert pool.score([], []) == ([], pool.score([], [])[1])
    assert rewards == [i + 0.5 for i in range(200)]
    assert (failures.count, failures.first) == (0, "")


def test_a_bad_reward_costs_one_completion(custom):
    bad = {
        "raise": "raised KeyError: 'oh'",
        "exit": "raised SystemExit: 3",
        "nan": "is nan",
        "text": "returned str, which is not a number",
        "hang": "took longer than reward.timeout_s=1",
        "die": "ended its process",
    }
    with RewardPool(custom("bad_rewards"), timeout_s=1, num_processes=2) as pool:
        for completion, reason in bad.items():
            rewards, failures = pool.score(["1", completion, "2"], ["0"] * 3)
            assert rewards == [1.0, 0.0, 2.0]
            assert failures.count == 1
            assert failures.first.startswith(reason)
        rewards, failures = pool.score(["nan", "1", "raise", "die"], ["0"] * 4)
        assert rewards == [0.0, 1.0, 0.0, 0.0]
        assert (failures.count, failures.first) == (3, "is nan")
        assert pool.score(["3"], ["0"])[0] == [3.0]


def test_the_time_limit_leaves_imports_out(custom):
    # Each process that is killed is followed by one that imports the module again.
    with RewardPool(custom("slow_rewards", import_s=1.2), timeout_s=0.8, num_processes=1) as pool:
        rewards, failures = pool.score(["1", "hang", "2"], ["0"] * 3)
    assert rewards == [1.0, 0.0, 2.0]
    assert failures.count == 1


def test_rewards_that_are_slow_for_being_many_are_not_cut_off(custom):
    with RewardPool(custom("many_rewards"), timeout_s=1, num_processes=2) as pool:
        pool.score(["1"], ["0"])
        while len(_processes()) < 4:  # two, each with its guard
            time.sleep(0.05)
        started = {p.pid: p.create_time() for p in _processes()}
        rewards, failures = pool.score(["pid"] * 60, ["0"] * 60)  # 3 s, three times the limit of one
        assert failures.count == 0
        assert len(set(rewards)) == 2  # both processes had their share
        assert {p.pid: p.create_time() for p in _processes()} == started  # and neither was killed


@pytest.mark.parametrize("pause_s", [0.0, 0.5])  # before and after the pool has noticed
def test_a_process_that_dies_between_two_calls_is_replaced(custom, pause_s):
    with RewardPool(custom("replaced_rewards"), timeout_s=30, num_processes=2) as pool:
        pool.score(["1"], ["0"])
        for process in _processes():
            process.kill()
        time.sleep(pause_s)
        rewards, failures = pool.score([str(i) for i in range(100)], ["0"] * 100)
        assert (rewards, failures.count) == ([float(i) for i in range(100)], 0)


def test_processes_that_cannot_start_stop_the_run(custom, tmp_path):
    name = custom("vanishing_rewards")
    pool = RewardPool(name, timeout_s=30, num_processes=1)
    (tmp_path / "vanishing_rewards.py").unlink()
    with pool, pytest.raises(WorkerError, match=f"processes of reward.name={name} die as they start"):
        pool.score(["1"], ["0"])


_BEFORE: set[psutil.Process] = set()


@pytest.fixture(autouse=True)
def _others() -> None:
    """Processes of other tests, which are none of ours."""
    global _BEFORE
    _BEFORE = set(psutil.Process().children(recursive=True))


def _processes() -> list[psutil.Process]:
    children = set(psutil.Process().children(recursive=True)) - _BEFORE
    return [p for p in children if "trainer.rewards.worker" in " ".join(p.cmdline())]


def test_pool_refuses_an_unknown_reward():
    with pytest.raises(UserError, match="reward.name=no_such"):
        RewardPool("no_such", 1, 1)


DRIVER = """
from trainer.rewards.pool import RewardPool

with RewardPool("{name}", 60, 2) as pool:
    pool.score(["1"] * 256, ["0"] * 256)
    print("ready", flush=True)
    pool.score(["hang", "hang"], ["0", "0"])
"""


def test_processes_end_with_a_killed_driver(custom):
    # One of them is at work: an idle one ends by itself when its pipe closes.
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER.format(name=custom("killed_rewards"))], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
    )  # fmt: skip
    try:
        assert driver.stdout.readline() == "ready\n"
        time.sleep(0.5)
        children = psutil.Process(driver.pid).children(recursive=True)
        assert len(children) >= 2
        driver.kill()
        driver.wait()
        _, alive = psutil.wait_procs(children, timeout=10)
        try:
            assert [process.pid for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
        finally:
            for process in alive:
                process.kill()
    finally:
        driver.kill()


def test_leaving_the_pool_ends_a_reward_that_hangs(custom):
    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with RewardPool(custom("hanging_rewards"), timeout_s=60, num_processes=1) as pool:
            pool.score(["1"], ["0"])
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(KeyboardInterrupt):
                pool.score(["hang"], ["0"])
            assert pool.score(["2"], ["0"])[0] == [2.0]
            assert len(_processes()) == 2  # one, with its guard
    finally:
        signal.signal(signal.SIGALRM, before)
    assert _processes() == []
