"""When to save."""

from __future__ import annotations

import time

import pytest

from trainer.run.schedule import SaveSchedule


def test_saves_are_due_by_steps_and_by_minutes(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    steps = SaveSchedule(3, -1, 240)
    assert [step for step in range(1, 8) if steps.due(step)] == [3, 6]
    minutes = SaveSchedule(-1, 2.0, 240)
    now[0] = 119.0
    assert not minutes.due(1)
    now[0] = 120.0
    assert minutes.due(1)
    minutes.saved()
    assert not minutes.due(2)


def test_auto_saves_at_youngs_interval(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    schedule = SaveSchedule("auto", -1, mean_time_between_failures=50)
    assert schedule.due(1), "the first checkpoint is worth most"
    schedule.saved()
    schedule.measured(blocked_s=6.0, duration_s=20.0)
    assert schedule.best_interval_s() == pytest.approx((2 * 6 * 3000) ** 0.5)
    schedule.measured(blocked_s=0.0, duration_s=400.0)
    assert schedule.best_interval_s() == 800, "saves that cost nothing still take their time"
    now[0] = 799.0
    assert not schedule.due(2)
    now[0] = 800.0
    assert schedule.due(2)


def test_the_cost_of_an_expensive_save_is_halved_with_each_later_save():
    schedule = SaveSchedule("auto", -1, mean_time_between_failures=50)
    schedule.measured(blocked_s=8.0, duration_s=1.0)
    for cost in (4.0, 2.0, 1.0):
        schedule.measured(blocked_s=0.5, duration_s=1.0)
        assert schedule.best_interval_s() == pytest.approx((2 * cost * 3000) ** 0.5)
