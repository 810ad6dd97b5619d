"""The timer of a step's phases."""

from __future__ import annotations

import time

import pytest

from trainer.metrics.timing import Timer
from trainer.process.tracing import MAIN, TRACER


def test_timer_adds_up_phases_until_pop():
    timer = Timer()
    with timer("step"):
        for _ in range(2):
            with timer("rollout"):
                time.sleep(0.02)
        with pytest.raises(ZeroDivisionError), timer("update"):
            time.sleep(0.02)
            1 / 0  # noqa: B018
    seconds = timer.pop()
    assert set(seconds) == {"time/step", "time/rollout", "time/update"}
    assert seconds["time/rollout"] >= 0.04
    assert seconds["time/update"] >= 0.02
    assert seconds["time/step"] >= seconds["time/rollout"] + seconds["time/update"]
    assert timer.pop() == {}


def test_a_phase_is_a_span_of_exactly_its_seconds(monkeypatch):
    monkeypatch.setattr(TRACER, "is_on", True)
    timer = Timer()
    with timer("step", step=4), timer("rollout"):
        time.sleep(0.01)
    rollout, step = TRACER.take()
    seconds = timer.pop()
    assert (step.name, step.row, step.details, rollout.name) == ("step", MAIN, {"step": 4}, "rollout")
    assert rollout.end - rollout.start == seconds["time/rollout"] and step.end - step.start == seconds["time/step"]
    assert step.start <= rollout.start <= rollout.end <= step.end


def test_timer_refuses_an_unknown_phase_and_counting_twice():
    timer = Timer()
    with pytest.raises(AssertionError, match="time/rolout is not a metric"), timer("rolout"):
        pass
    with pytest.raises(AssertionError, match="count twice"), timer("rollout"), timer("rollout"):
        pass


def test_the_innermost_running_phase_is_known():
    timer = Timer()
    assert timer.running() is None
    with timer("step"):
        assert timer.running() is None  # the step itself is none of its phases
        with timer("rollout"):
            time.sleep(0.02)
            with timer("reward"):
                phase, seconds = timer.running()
                assert phase == "reward" and seconds >= 0
            phase, seconds = timer.running()
            assert phase == "rollout" and seconds >= 0.02
        with pytest.raises(ZeroDivisionError), timer("update"):
            1 / 0  # noqa: B018
        assert timer.running() is None
