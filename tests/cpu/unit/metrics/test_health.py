"""Advisories in the log, and metrics that stay above their limits."""

from __future__ import annotations

from trainer.config import Config, TrainerConfig
from trainer.metrics.advice import MetricChecks


def checks(history: list[dict] | None = None) -> MetricChecks:
    cfg = Config(trainer=TrainerConfig(divergence_limits={"policy/kl": 1.0}))
    return MetricChecks(cfg, True, history or [])


def test_an_advisory_is_logged_once_as_a_note(caplog):
    caplog.set_level("INFO")
    cut = {"response_length/clip_ratio": 0.6}
    check = checks()
    assert [check.update(step, cut) for step in range(1, 10)] == [None] * 9
    (line,) = caplog.messages
    assert line.startswith("NOTE: since step 1, response_length/clip_ratio is above 0.5: ")


def test_a_resumed_run_repeats_no_advisory_and_counts_the_steps_before(caplog):
    caplog.set_level("INFO")
    row = {"response_length/clip_ratio": 0.6, "policy/kl": 2.0}
    assert checks([{"step": step} | row for step in (1, 2, 3)]).update(4, row) is not None
    assert caplog.messages == []
    assert checks([{"step": step} | row for step in (1, 2)]).update(3, row) is not None
    assert len(caplog.messages) == 1


def diverged(check: MetricChecks, *values: float | None, first: int = 1) -> list[str]:
    """Return the findings of the check for steps with these values of `policy/kl`; a step with None has none."""
    rows = [{"policy/kl": value, "policy/loss": 50.0} for value in values]
    said = [check.update(step, row) for step, row in enumerate(rows, start=first)]
    return [str(one) for one in said if one is not None]


def test_a_metric_above_its_limit_for_several_consecutive_steps_has_diverged():
    check = checks()
    assert diverged(check, 2.0, 2.0, 1.0, 2.0, None, 2.0) == [], "a step at the limit is not above it"
    assert diverged(check, 3.0, first=7) == [
        "policy/kl has been above 1 since step 4, and is 3 now (trainer.divergence_limits)"
    ]


def test_a_resumed_run_counts_the_steps_before():
    history = [{"step": step, "policy/kl": 2.0} for step in (4, 5)]
    assert "since step 4" in str(checks(history).update(6, {"policy/kl": 2.0}))
    assert diverged(MetricChecks(Config(), True), 2.0, 2.0, 2.0) == []
