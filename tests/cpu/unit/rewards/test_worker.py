"""A reward function that fails, in whatever way, costs its own completion a zero and nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import bad_rewards
from tests.support.bad_rewards import BAD, CARELESS, NUMBERS
from tests.support.jobs import has_ended
from tests.support.rewards import judge, reward_pool, score
from trainer.algorithms import ADVANTAGES
from trainer.import_utils import options_of
from trainer.rewards.scorer import RewardInput
from trainer.rewards.scoring import RewardPool

NAME = "copied_rewards:score"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """The working directory, with a copy of the reward's module: it writes beside itself."""
    path = tmp_path_factory.mktemp("rewards")
    shutil.copy(bad_rewards.__file__, path / "copied_rewards.py")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        patch.setattr(sys, "path", sys.path[:])
        yield path


@pytest.fixture(scope="module")
def pool(directory):
    with reward_pool(NAME, timeout_s=2, num_processes=2) as pool:
        yield pool


@pytest.fixture(scope="module")
def single(directory):
    """With one process, so that every completion follows on the one before."""
    with reward_pool(NAME, timeout_s=5, num_processes=1) as pool:
        yield pool


def score_all(pool: RewardPool, *completions: str):
    return score(pool, completions, [""] * len(completions))


def children_of(directory: Path) -> list[int]:
    file = directory / "pids.txt"
    pids = [int(line) for line in file.read_text().split()] if file.exists() else []
    file.unlink(missing_ok=True)
    return pids


def end_of(pids: list[int]) -> list[int]:
    """Return the processes of `pids` that still run after some seconds."""
    for _ in range(200):
        pids = [pid for pid in pids if not has_ended(pid)]
        if not pids:
            break
        time.sleep(0.05)
    return pids


@pytest.mark.parametrize("name", BAD)
def test_a_bad_reward_costs_one_zero_and_one_short_line(pool, directory, name, caplog):
    caplog.set_level("INFO", "trainer")
    children_of(directory)
    rewards, failures = score_all(pool, "1", name, "2", "3")
    assert rewards == [1.0, 0.0, 2.0, 3.0]
    assert failures.count == 1
    assert failures.first.startswith(BAD[name][1])
    assert len(failures.first) < 250 and failures.first.isprintable()
    assert not [line for line in caplog.messages if not line.startswith("[reward]")]
    left = children_of(directory)
    assert bool(left) == name.startswith("leaves")
    assert end_of(left) == []


def test_a_careless_reward_counts_and_changes_no_other(single):
    for name in CARELESS:
        rewards, failures = score_all(single, "1", name, "2")
        assert (rewards, failures.count) == ([1.0, 1.0, 2.0], 0)


def test_all_kinds_of_numbers_are_rewards(single):
    for name in NUMBERS:
        rewards, failures = score_all(single, name)
        assert (rewards, failures.count) == ([1.0], 0)


def test_output_is_logged_shortened_and_not_on_the_terminal(single, capfd, caplog):
    caplog.set_level("INFO", "trainer")
    score_all(single, "prints", "1")
    assert caplog.messages == ["[reward] hello?[2J"]
    caplog.clear()
    score_all(single, "prints 50 MB", "1")
    shown = list(caplog.messages)
    assert len(shown) <= 22
    assert all(len(line) < 250 and line.isprintable() for line in shown)
    assert shown[-1].endswith("more bytes of output are not shown")
    caplog.clear()
    score_all(single, "1")
    assert caplog.messages == []
    assert capfd.readouterr() == ("", "")


good = st.integers(-5, 5).map(str)
bad = st.sampled_from(["raises KeyboardInterrupt", "raises 50 MB", "returns 1e308", "returns None", "exits with 3"])
careless = st.sampled_from(["prints", "forks and returns twice"])


@settings(max_examples=15, deadline=None)
@given(completions=st.lists(good | bad | careless, max_size=20))
def test_exactly_the_bad_ones_of_any_mixture_are_zero_and_counted(pool, completions):
    rewards, failures = score_all(pool, *completions)
    assert rewards == [0.0 if c in BAD else 1.0 if c in CARELESS else float(c) for c in completions]
    assert failures.count == sum(c in BAD for c in completions)


def test_after_many_calls_that_hang_the_others_are_not_tried(directory, monkeypatch):
    monkeypatch.setattr("trainer.sandbox.limits.MAX_TIMEOUTS", 3)  # instead of 30, to be quick
    with reward_pool(NAME, timeout_s=0.5, num_processes=1) as pool:
        scores = judge(pool, [RewardInput(text, "") for text in ("1", *["hangs"] * 500)])
        assert scores.rewards == [1.0] + [0.0] * 500
        tried = [reason for reason in scores.reasons if reason.startswith("took longer")]
        assert len(tried) == 3 and scores.reasons[-1] == "was not tried: 3 calls had taken longer than reward.timeout_s"
        assert score_all(pool, "2", "3")[0] == [2.0, 3.0]  # the next step is not affected


def test_a_result_that_comes_while_another_process_is_replaced_is_in_time(directory):
    with reward_pool(NAME, timeout_s=2.5, num_processes=2) as pool:
        while len(set(score(pool, ["waits and returns its process"] * 2, ["0.2"] * 2)[0])) < 2:
            pass  # until both have started
        rewards, failures = score(pool, ["waits and closes all files", "waits and returns"], ["1.9", "2.0"])
    assert (rewards, failures.count) == ([0.0, 1.0], 1)


DRIVER = f"""
import sys, time
from tests.support.rewards import reward_pool, score

if __name__ == "__main__":
    with reward_pool("{NAME}", float(sys.argv[1]), 1) as pool:
        score(pool, ["1"], [""])
        print("ready", flush=True)
        print(score(pool, sys.argv[2:], ["1"] * len(sys.argv[2:])), flush=True)
"""


def drive(directory: Path, *arguments: str) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[4])}
    (directory / "driver.py").write_text(DRIVER)
    return subprocess.Popen(
        [sys.executable, "driver.py", *arguments], cwd=directory, stdout=subprocess.PIPE, text=True, env=environment
    )


def test_a_killed_driver_takes_daemons_of_rewards_along(directory):
    children_of(directory)
    driver = drive(directory, "60", "leaves a daemon and hangs")
    try:
        assert driver.stdout.readline() == "ready\n"
        while not (directory / "pids.txt").exists():
            time.sleep(0.05)
        below = [process.pid for process in psutil.Process(driver.pid).children(recursive=True)]
        assert len(below) >= 3  # reaper, worker, daemon
    finally:
        driver.kill()
        driver.wait()
    assert end_of([*below, *children_of(directory)]) == []


def test_time_in_which_the_job_is_stopped_counts_for_no_reward(directory):
    driver = drive(directory, "2", "waits and returns")
    try:
        assert driver.stdout.readline() == "ready\n"
        time.sleep(0.3)
        job = [psutil.Process(driver.pid), *psutil.Process(driver.pid).children(recursive=True)]
        for process in job:
            process.suspend()
        time.sleep(4)
        for process in job:  # the driver first: it finds that the time is up
            process.resume()
            time.sleep(0.2)
        assert driver.stdout.readline().startswith("([1.0], Failures(count=0,")
    finally:
        driver.kill()
        driver.wait()


def test_the_largest_reward_leaves_every_advantage_finite():
    torch.manual_seed(0)
    mask, groups = torch.ones(64, 3), torch.arange(64) // 8
    rewards = torch.zeros(64, 3)
    rewards[:, -1] = torch.tensor(np.random.default_rng(0).choice([-1e12, 0.0, 1e12], 64), dtype=torch.float32)
    given = {"values": torch.zeros(64, 3), "baselines": -rewards.sum(1), "gamma": 1.0, "lam": 0.95, "pass_k": 2}
    given |= {"old_logprobs": -mask, "teacher_logprobs": -2 * mask, "player_baselines": -rewards.sum(1)}
    for name, estimator in ADVANTAGES.items():
        options = {key: value for key, value in given.items() if key in options_of(estimator)}
        for result in estimator(rewards, mask, groups, **options):
            assert torch.isfinite(result).all(), name
            assert torch.isfinite(result.square().sum()), name
