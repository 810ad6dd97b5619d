"""What the results of saves mean for the run."""

from __future__ import annotations

import pytest

from trainer.checkpoint.manager import SaveResult
from trainer.errors import UserError
from trainer.run.save_tracker import SaveTracker
from trainer.run.schedule import SaveSchedule


def results(allowed: int) -> SaveTracker:
    return SaveTracker("/runs", allowed, SaveSchedule(1, -1, 240))


def good(step: int, seconds: float = 1.0) -> SaveResult:
    return SaveResult(step, f"/runs/global_step_{step}", seconds)


def bad(step: int) -> SaveResult:
    return SaveResult(step, f"/runs/global_step_{step}", 1.0, error="disk full")


def test_failures_with_a_good_save_between_them_are_not_in_a_row():
    saves = results(allowed=1)
    for step in range(1, 9, 2):
        saves.collect([bad(step), good(step + 1)])
    with pytest.raises(UserError, match="step 10 FAILED .disk full.; the last good one is .*step_8; 2 failed in a row"):
        saves.collect([bad(9), bad(10)])


def test_tries_of_the_last_save_do_not_end_the_run():
    saves = results(allowed=0)
    saves.collect([bad(3)] * 4, last=True)
    assert (saves.failure, saves.last_good) == ("disk full", "")


def test_a_failed_save_is_begun_again_and_an_older_one_says_nothing_of_a_newer():
    saves = results(allowed=9)
    saves.begun = 4
    saves.collect([bad(3)])
    assert saves.begun == 4
    saves.collect([bad(4)])
    assert saves.begun is None


def test_a_good_save_tells_its_path_and_its_cost():
    saves = results(allowed=0)
    saves.blocked_s = 6.0
    saves.collect([good(2, seconds=20.0)])
    assert (saves.last_good, saves.seconds) == ("/runs/global_step_2", 20.0)
    assert saves._schedule.best_interval_s() == pytest.approx((2 * 6 * 240 * 60) ** 0.5)
