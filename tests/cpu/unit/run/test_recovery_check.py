"""The speed of a run after a recovery, against the band before."""

from __future__ import annotations

import math

import pytest

from trainer.errors import FailureSource
from trainer.run.recovery_check import RecoveryCheck, SlowdownCheck, compare_since, name_slow_ranks, slowest_share


def rows(*seconds: float, rollout: float = 0.5) -> list[dict[str, float]]:
    return [
        {"step": i, "time/step": s, "time/rollout": rollout * s, "time/update": (1 - rollout) * s}
        for i, s in enumerate(seconds, start=1)
    ]


def said(before: list[dict[str, float]], after: list[dict[str, float]]) -> list[str]:
    check = RecoveryCheck(before)
    return [sentence for row in after if (sentence := check.update(row))]


@pytest.mark.parametrize("after", [(9.0, 2.0, 2.1, 9.0), (2.6, 2.6, 2.6), (9.0, 9.0)])
def test_a_run_within_its_band_or_with_one_slow_step_is_well(after):
    assert said(rows(2.0, 2.2, 1.9, 2.1), rows(*after)) == []


def test_a_run_that_stays_slow_is_said_so_once_with_the_phase():
    before, after = rows(2.0, 2.2, 2.0), rows(4.0, 4.0, 4.4, 9.0, 9.0, rollout=0.25)
    (sentence,) = said(before, after)
    assert "a step takes 4 s; before it took 2 s, and 2.2 s at most" in sentence
    assert sentence.endswith("The slow phase is update: 3 s in place of 1 s")


@pytest.mark.parametrize("before", [[], rows(1.0, 1.0), [{"step": 0, "val/accuracy": 0.5}] * 5])
def test_without_a_band_nothing_is_said(before):
    assert said(before, rows(9.0, 9.0, 9.0)) == []


def test_metrics_and_counters_since_an_incident_stand_beside_those_before():
    logged = [{"step": 0, "val/accuracy": 0.5}]
    logged += [{"step": s, "policy/loss": s / 10, "time/step": 1.0, "progress/prompts": 4 * s} for s in range(1, 7)]
    logged[5] |= {"policy/loss": None, "time/step": 3.0}
    assert compare_since(logged, step=5) == [
        "steps 5 to 6, beside the 4 before",
        "policy/loss 0.6 on average, before 0.1 to 0.4",
        "time/step 2 on average, before 1 to 1",
        "progress/prompts rises by 4 a step, before by 4",
    ]
    logged[6]["progress/prompts"] += 4
    assert compare_since(logged, step=5)[-1] == "progress/prompts rises by 4 to 8 a step, before by 4"


def test_the_last_twenty_steps_are_those_before():
    logged = rows(*[9.0] * 10, *[1.0] * 20, 2.0)
    assert compare_since(logged, step=31)[:2] == [
        "steps 31 to 31, beside the 20 before",
        "time/step 2 on average, before 1 to 1",
    ]


@pytest.mark.parametrize("step", [0, 1, 4])
def test_without_steps_on_both_sides_nothing_is_compared(step):
    assert compare_since(rows(1.0, 1.0, 1.0), step) == []


def speeds(*values: float) -> dict[FailureSource, float]:
    """Speeds of ranks, each on a node of its own."""
    return {FailureSource(f"rank {i}", f"10.0.0.{i}"): value for i, value in enumerate(values)}


def test_slow_ranks_are_named_with_their_nodes_the_slowest_first():
    assert name_slow_ranks(speeds(4e12, 2.4e12, 3.1e12, 1e12, math.nan)) == (
        "slower than the fastest rank, each measured by itself: rank 3 on 10.0.0.3 (25%), rank 1 on 10.0.0.1 (60%)"
    )


@pytest.mark.parametrize("values", [(4e12, 3.1e12, math.nan), (4e12,), (math.nan,), ()])
def test_ranks_of_one_speed_are_not_the_cause(values):
    assert name_slow_ranks(speeds(*values)).startswith("no rank computes more slowly than the others")


@pytest.mark.parametrize(
    ("values", "share"),
    [((4e12, 3e12, 1e12), 0.25), ((4e12, math.nan, 4e12), 1.0), ((4e12, math.nan), None), ((), None)],
)
def test_the_slowest_rank_is_a_share_of_the_fastest(values, share):
    assert slowest_share(speeds(*values)) == share


def measured(*speeds: float) -> list[int]:
    """The steps after which the ranks are measured, by the tokens per second of the ranks in each step."""
    check = SlowdownCheck()
    rows = [
        {"perf/tokens_per_s": speed / 2, "time/step": 2.0, "time/logprob": 0.25, "time/update": 0.75}
        for speed in speeds
    ]
    return [step for step, row in enumerate(rows, start=1) if check.update(row)]


def test_ranks_are_measured_once_their_speed_is_known_and_when_they_have_become_slower():
    assert measured(*[100.0] * 19) == []
    assert measured(*[100.0] * 80) == [20]
    assert measured(*[100.0] * 40, 70.0, 70.0, 100.0, 70.0, 70.0, *[100.0] * 20) == [20], "not for two slow steps"
    assert measured(*[100.0] * 40, *[70.0] * 6) == [20, 43]
    assert measured(*[100.0] * 30, *[70.0] * 30) == [20, 40], "not sooner than 20 steps after the last time"


def test_steps_without_an_update_do_not_count():
    check = SlowdownCheck()
    assert not any(check.update(row) for row in [{}, {"perf/tokens_per_s": math.nan, "time/step": 1.0}] * 30)
