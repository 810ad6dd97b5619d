"""Warnings about runs that learn little, and metrics that stay above their limits."""

from __future__ import annotations

import json

import pytest

from trainer.metrics.health import DivergenceCheck, TrainingWarnings

EQUAL = {"reward/zero_std_frac": 1.0, "reward/std": 0.3, "reward/mean": 0.5}
MIXED = {"reward/zero_std_frac": 0.5, "reward/std": 0.3, "reward/mean": 0.5}
CUT, SHORT = {"response_length/clip_ratio": 0.6}, {"response_length/clip_ratio": 0.5}
BLIND, SEEING = {"critic/explained_variance": -0.1}, {"critic/explained_variance": 0.1}


def warned(health: TrainingWarnings, rows: list[dict], first: int = 1) -> list[tuple[int, str]]:
    """The warnings of each step: its number, and the sentence."""
    return [(step, text) for step, row in enumerate(rows, start=first) for text in health.update(step, row)]


@pytest.mark.parametrize(
    ("bad", "good", "steps", "names"),
    [
        (EQUAL, MIXED, 3, ("the same reward", "reward/zero_std_frac", "rollout.n", "rollout.temperature")),
        (CUT, SHORT, 3, ("cut off", "response_length/clip_ratio", "rollout.max_response_tokens")),
        (BLIND, SEEING, 10, ("explained nothing", "critic/explained_variance", "trainer.critic.optimizer.lr")),
    ],
)
def test_a_symptom_is_reported_once_and_again_only_after_it_was_absent(bad, good, steps, names):
    health = TrainingWarnings(compares_completions=True)
    assert warned(health, [good] * 20 + [bad] * (steps - 1) + [good] + [bad] * (steps - 1) + [good] * steps) == []
    ((step, text),) = warned(health, [bad] * 30, first=100)
    assert step == 100 + steps - 1 and text.startswith("since step 100, ")
    assert all(name in text for name in names) and "\n" not in text
    one_good = ([good] + [bad] * (steps + 2)) * 3
    assert warned(health, one_good, first=200) == [], "one good step is not the end of it"
    ((step, text),) = warned(health, [good] * steps + [bad] * 30, first=300)
    assert step == 300 + 2 * steps - 1 and text.startswith(f"since step {300 + steps}, ")


def test_groups_of_equal_rewards_teach_an_estimator_that_does_not_compare_completions():
    assert warned(TrainingWarnings(compares_completions=False), [EQUAL] * 20) == []
    same = {"reward/zero_std_frac": 1.0, "reward/std": 5e-17, "reward/mean": 0.1}
    ((step, text),) = warned(TrainingWarnings(compares_completions=False), [same] * 20)
    assert step == 3 and "reward/std" in text and "rollout.temperature" in text


def test_steps_without_a_metric_do_not_count():
    health = TrainingWarnings(compares_completions=True)
    assert warned(health, [CUT, {"val/accuracy": 1.0}, CUT, {}]) == []
    assert [step for step, _ in warned(health, [CUT], first=5)] == [5]


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_metric_that_is_not_finite_is_no_symptom(value):
    rows = [BLIND] * 9 + [{"critic/explained_variance": value}] + [BLIND] * 9
    assert warned(TrainingWarnings(compares_completions=True), rows) == []


@pytest.mark.parametrize("kept", range(41))
def test_a_resumed_run_warns_like_the_uninterrupted_one(kept):
    odd = {"critic/explained_variance": float("-inf")}
    rows = [EQUAL | CUT | BLIND] * 12 + [MIXED | CUT | odd] * 4 + [EQUAL | SHORT | BLIND] * 12 + [EQUAL | CUT] * 12
    expected = warned(TrainingWarnings(True), rows)
    assert len(expected) == 5
    lines = [{"step": step} | row for step, row in enumerate(rows, start=1)]
    logged = json.loads(json.dumps(lines).replace("-Infinity", "null"))  # as the tracker writes it
    assert warned(TrainingWarnings(True, logged[:kept]), rows[kept:], first=kept + 1) == [
        w for w in expected if w[0] > kept
    ]


def diverged(check: DivergenceCheck, *values: float | None, first: int = 1) -> list[str]:
    """Return the findings of the check for steps with these values of `policy/kl`; a step with None has none."""
    rows = [{"policy/kl": value, "policy/loss": 50.0} for value in values]
    said = [check.update(step, row) for step, row in enumerate(rows, start=first)]
    return [str(one) for one in said if one is not None]


def test_a_metric_above_its_limit_for_several_consecutive_steps_has_diverged():
    check = DivergenceCheck({"policy/kl": 1.0}, 3)
    assert diverged(check, 2.0, 2.0, 1.0, 2.0, None, 2.0) == [], "a step at the limit is not above it"
    assert diverged(check, 3.0, first=7) == [
        "policy/kl has been above 1 since step 4, and is 3 now (trainer.divergence_limits)"
    ]


def test_a_resumed_run_counts_the_steps_before():
    history = [{"step": step, "policy/kl": 2.0} for step in (4, 5)]
    (said,) = diverged(DivergenceCheck({"policy/kl": 1.0}, 3, history), 2.0, first=6)
    assert "since step 4" in said
    assert diverged(DivergenceCheck({}, 1, history), 2.0) == []
