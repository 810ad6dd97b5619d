"""When saves are due, and what their results mean for the run."""

from __future__ import annotations

import time

import pytest

from trainer.checkpoint.manager import CheckpointManager, SaveResult
from trainer.checkpoint.store import open_store
from trainer.errors import UserError
from trainer.run.saves import FAILURES_ALLOWED, Saves


def saves_every(interval: int | str) -> Saves:
    return Saves(interval, "/runs", CheckpointManager(open_store("/runs")))


def saved(saves: Saves, step: int, blocked_s: float, duration_s: float) -> None:
    saves.add_blocked(step, blocked_s)
    saves.collect([good(step, duration_s)])


def test_saves_are_due_by_steps():
    assert [step for step in range(1, 8) if saves_every(3).is_due(step)] == [3, 6]


def test_auto_saves_at_youngs_interval(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    saves = saves_every("auto")
    assert saves.is_due(1), "the first checkpoint is worth most"
    saved(saves, 1, blocked_s=6.0, duration_s=20.0)
    assert saves.best_interval_s() == pytest.approx((2 * 6 * 14400) ** 0.5)
    saved(saves, 2, blocked_s=0.0, duration_s=400.0)
    assert saves.best_interval_s() == 800, "saves that cost nothing still take their time"
    now[0] = 799.0
    assert not saves.is_due(2)
    now[0] = 800.0
    assert saves.is_due(2)


def test_the_cost_of_an_expensive_save_is_halved_with_each_later_save():
    saves = saves_every("auto")
    saved(saves, 1, blocked_s=8.0, duration_s=1.0)
    for step, cost in enumerate((4.0, 2.0, 1.0), 2):
        saved(saves, step, blocked_s=0.5, duration_s=1.0)
        assert saves.best_interval_s() == pytest.approx((2 * cost * 14400) ** 0.5)


def results() -> Saves:
    return saves_every(1)


def good(step: int, seconds: float = 1.0) -> SaveResult:
    return SaveResult(step, f"/runs/global_step_{step}", seconds)


def bad(step: int) -> SaveResult:
    return SaveResult(step, f"/runs/global_step_{step}", 1.0, error="disk full")


def test_failures_with_a_good_save_between_them_are_not_in_a_row():
    saves = results()
    for step in range(1, 9, 2):
        saves.collect([bad(step), good(step + 1)])
    saves.collect([bad(step) for step in range(9, 9 + FAILURES_ALLOWED)])
    sentence = "step 20 FAILED .disk full.; the last good one is .*step_8; 4 failed in a row; free space or raise"
    with pytest.raises(UserError, match=sentence):
        saves.collect([bad(20)])


def test_tries_of_the_last_save_do_not_end_the_run():
    saves = results()
    saves.collect([bad(3)] * 5, last=True)
    assert (saves.failure, saves.last_good) == ("disk full", "")


def test_a_failed_save_is_begun_again_and_an_older_one_says_nothing_of_a_newer():
    saves = results()
    saves.begun = 4
    saves.collect([bad(3)])
    assert saves.begun == 4
    saves.collect([bad(4)])
    assert saves.begun is None


def test_each_save_costs_what_training_has_waited_for_it():
    """Save 2 ends while save 4 begins and waits for it, so its result is collected after both."""
    saves = results()
    saves.begun = 2
    saves.add_blocked(2, 1.0)
    with saves._blocking(saves.begun):
        pass  # the wait for save 2
    saves.add_blocked(4, 50.0)
    saves.collect([good(2, seconds=0.0)])
    assert saves.best_interval_s() == pytest.approx((2 * 1 * 240 * 60) ** 0.5, rel=0.01)
    saves.collect([good(4, seconds=0.0)])
    assert saves.best_interval_s() == pytest.approx((2 * 50 * 240 * 60) ** 0.5, rel=0.01)


def test_a_good_save_tells_its_path_and_its_cost():
    saves = results()
    saves.add_blocked(2, 6.0)
    saves.collect([good(2, seconds=20.0)])
    assert (saves.last_good, saves.seconds) == ("/runs/global_step_2", 20.0)
    assert saves.best_interval_s() == pytest.approx((2 * 6 * 240 * 60) ** 0.5)
