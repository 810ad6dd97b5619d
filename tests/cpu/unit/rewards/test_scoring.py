"""Scoring in processes of their own, where a bad reward costs one completion."""

from __future__ import annotations

import datetime
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.support.jobs import command_of, wait_until
from tests.support.rewards import full, reward_pool, score
from trainer.cluster.supervisor import end_all, is_running
from trainer.errors import UserError, WorkerError
from trainer.process.failures import INCIDENTS, INFRASTRUCTURE, read_incidents
from trainer.rewards import scoring

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
    with reward_pool(custom("order_rewards"), timeout_s=30, num_processes=2) as pool:
        rewards, failures = score(pool, [str(i) for i in range(200)], ["0.5"] * 200)
        assert score(pool, [], []) == ([], score(pool, [], [])[1])
    assert rewards == [i + 0.5 for i in range(200)]
    assert (failures.count, failures.first) == (0, "")


def test_a_bad_reward_costs_one_completion(custom):
    bad = {
        "raise": "raised KeyError: 'oh' in bad_rewards.py:",
        "exit": "raised SystemExit: 3",
        "nan": "is nan",
        "text": "returned str, which is not a number",
        "hang": "took longer than reward.timeout_s=3",
        "die": "ended its process",
    }
    with reward_pool(custom("bad_rewards"), timeout_s=3, num_processes=2) as pool:
        for completion, reason in bad.items():
            rewards, failures = score(pool, ["1", completion, "2"], ["0"] * 3)
            assert rewards == [1.0, 0.0, 2.0]
            assert failures.count == 1
            assert failures.first.startswith(reason)
        rewards, failures = score(pool, ["nan", "1", "raise", "die"], ["0"] * 4)
        assert rewards == [0.0, 1.0, 0.0, 0.0]
        assert (failures.count, failures.first) == (3, "is nan")
        assert score(pool, ["3"], ["0"])[0] == [3.0]


def test_the_time_limit_leaves_imports_out(custom):
    # Each process that is killed is followed by one that imports the module again.
    with reward_pool(custom("slow_rewards", import_s=2.5), timeout_s=2, num_processes=1) as pool:
        rewards, failures = score(pool, ["1", "hang", "2"], ["0"] * 3)
    assert rewards == [1.0, 0.0, 2.0]
    assert failures.count == 1


def test_rewards_that_are_slow_for_being_many_are_not_cut_off(custom):
    with reward_pool(custom("many_rewards"), timeout_s=2, num_processes=2) as pool:
        score(pool, ["1"], ["0"])
        while len(_processes()) < 4:  # two, each with its reaper
            time.sleep(0.05)
        started = {p.pid: p.create_time() for p in _processes()}
        rewards, failures = score(pool, ["pid"] * 100, ["0"] * 100)  # 5 s, more than twice the limit of one
        assert failures.count == 0
        assert len(set(rewards)) == 2  # both processes had their share
        assert {p.pid: p.create_time() for p in _processes()} == started  # and neither was killed


@pytest.mark.parametrize("pause_s", [0.0, 0.5])  # before and after the pool has noticed
def test_a_process_that_dies_between_two_calls_is_replaced(custom, pause_s, tmp_path):
    INCIDENTS.open(str(tmp_path))
    with reward_pool(custom("replaced_rewards"), timeout_s=30, num_processes=2) as pool:
        score(pool, ["1"], ["0"])
        for process in _processes():
            process.kill()
        time.sleep(pause_s)
        rewards, failures = score(pool, [str(i) for i in range(100)], ["0"] * 100)
        assert (rewards, failures.count) == ([float(i) for i in range(100)], 0)
    INCIDENTS.close()
    incidents = read_incidents(str(tmp_path))
    assert {(one.role, one.cause, one.kind) for one in incidents} == {("reward", "killed process", INFRASTRUCTURE)}
    assert len(incidents) == 2


def test_a_stopped_process_is_replaced_and_costs_no_completion(custom, tmp_path):
    """A process that somebody stops is silent as a reward that hangs, but the reward is not at fault."""
    INCIDENTS.open(str(tmp_path))
    with reward_pool(custom("stopped_rewards"), timeout_s=3, num_processes=1) as pool:
        score(pool, ["1"], ["0"])
        for process in _processes():
            if any(child in _processes() for child in process.children()):
                continue  # the reaper
            process.suspend()
        assert score(pool, ["1", "2"], ["0", "0"])[0] == [1.0, 2.0]
    INCIDENTS.close()
    assert ["stopped by a signal" in one.text for one in read_incidents(str(tmp_path))] == [True]


def test_a_process_that_is_stopped_while_it_starts_is_replaced(custom, tmp_path):
    INCIDENTS.open(str(tmp_path))
    with reward_pool(custom("stopped_at_start", import_s=1), timeout_s=3, num_processes=1) as pool:
        wait_until(lambda: len(_processes()) == 2)
        max(_processes(), key=lambda process: process.ppid() != os.getpid()).suspend()  # not the reaper
        assert score(pool, ["1", "2"], ["0", "0"])[0] == [1.0, 2.0]
    INCIDENTS.close()
    assert ["stopped by a signal" in one.text for one in read_incidents(str(tmp_path))] == [True]


def test_processes_that_cannot_start_stop_the_run(custom, tmp_path):
    name = custom("vanishing_rewards")
    pool = reward_pool(name, timeout_s=30, num_processes=1)
    (tmp_path / "vanishing_rewards.py").unlink()
    with pool, pytest.raises(WorkerError, match=f"processes of reward.name={name} die as they start"):
        score(pool, ["1"], ["0"])


_BEFORE: set[psutil.Process] = set()


@pytest.fixture(autouse=True)
def _others() -> None:
    """Processes of other tests, which are none of ours."""
    global _BEFORE
    _BEFORE = set(psutil.Process().children(recursive=True))


def _processes() -> list[psutil.Process]:
    children = set(psutil.Process().children(recursive=True)) - _BEFORE
    return [p for p in children if "trainer.rewards.worker" in command_of(p)]


def test_pool_refuses_an_unknown_reward():
    with pytest.raises(UserError, match="reward.name=no_such"):
        reward_pool("no_such", 1, 1)


DRIVER = """
from tests.support.jobs import wait_until
from tests.support.rewards import full, reward_pool, score

with reward_pool("{name}", 60, 2) as pool:
    score(pool, ["1"] * 256, ["0"] * 256)
    print("ready", flush=True)
    score(pool, ["hang", "hang"], ["0", "0"])
"""


def test_processes_end_with_a_killed_driver(custom):
    # One of them is at work: an idle one ends by itself when its pipe closes.
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER.format(name=custom("killed_rewards"))], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[4])},
    )  # fmt: skip
    try:
        assert driver.stdout.readline() == "ready\n"
        time.sleep(0.5)
        children = psutil.Process(driver.pid).children(recursive=True)
        assert len(children) >= 2
        driver.kill()
        driver.wait()
        try:
            wait_until(lambda: not any(map(is_running, children)))
        finally:
            end_all(children)
    finally:
        driver.kill()


def test_leaving_the_pool_ends_a_reward_that_hangs(custom):
    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with reward_pool(custom("hanging_rewards"), timeout_s=60, num_processes=1) as pool:
            score(pool, ["1"], ["0"])
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(KeyboardInterrupt):
                score(pool, ["hang"], ["0"])
            assert score(pool, ["2"], ["0"])[0] == [2.0]
            assert len(_processes()) == 2  # one, with its reaper
    finally:
        signal.signal(signal.SIGALRM, before)
    assert _processes() == []


ROWS = """
def by_row(completion, answer, row):
    return float(row["points"]) + float(completion)

def by_any(completion, answer, **given):
    return float(given["row"]["points"])

def plain(completion, answer):
    return float(completion)
"""


@pytest.mark.parametrize("name, expected", [("by_row", [11.0, 22.0]), ("by_any", [10.0, 20.0]), ("plain", [1.0, 2.0])])
def test_a_reward_that_asks_for_it_gets_the_whole_row(tmp_path, monkeypatch, name, expected):
    (tmp_path / "row_rewards.py").write_text(ROWS)
    monkeypatch.syspath_prepend(str(tmp_path))
    rows = [{"points": 10, "day": datetime.date(2026, 1, 2)}, {"points": 20, "day": None}]
    with reward_pool(f"row_rewards:{name}", 10, 1) as pool:
        rewards, failures = score(pool, ["1", "2"], ["", ""], rows)
    assert rewards == expected and failures.count == 0


def test_groups_are_wanted_where_completions_are_judged_together(monkeypatch):
    """By a function that asks for all completions, or by a server that gets several in a request."""
    for names, size, wants_groups in [
        (["length"], 16, False),
        (["length", "rank"], 16, True),
        (["remote"], 16, True),
        (["length", "remote"], 1, False),
    ]:
        url = {"url": "http://127.0.0.1:9/score"} if "remote" in names else {}
        monkeypatch.setattr(scoring, "COMPLETIONS_PER_REQUEST", size)
        pool = reward_pool([name if name == "remote" else full(name) for name in names], **url)
        assert pool.wants_groups is wants_groups
