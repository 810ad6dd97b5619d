"""Metrics that stay above their limits."""

from __future__ import annotations

from trainer.metrics.divergence import DivergenceCheck


def found(check: DivergenceCheck, *values: float | None, first: int = 1) -> list[str]:
    """What the check says of steps with these values of `policy/kl`; a step with None does not have it."""
    rows = [{"policy/kl": value, "policy/loss": 50.0} for value in values]
    said = [check.update(step, row) for step, row in enumerate(rows, start=first)]
    return [str(one) for one in said if one is not None]


def test_a_metric_above_its_limit_for_several_consecutive_steps_has_diverged():
    check = DivergenceCheck({"policy/kl": 1.0}, 3)
    assert found(check, 2.0, 2.0, 1.0, 2.0, None, 2.0) == [], "a step at the limit is not above it"
    assert found(check, 3.0, first=7) == [
        "policy/kl has been above 1 since step 4, and is 3 now (trainer.divergence_limits)"
    ]


def test_a_resumed_run_counts_the_steps_before():
    history = [{"step": step, "policy/kl": 2.0} for step in (4, 5)]
    (said,) = found(DivergenceCheck({"policy/kl": 1.0}, 3, history), 2.0, first=6)
    assert "since step 4" in said
    assert found(DivergenceCheck({}, 1, history), 2.0) == []
