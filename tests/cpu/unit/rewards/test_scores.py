"""Weighted sums of rewards and the failures among them."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from trainer.rewards.scores import Failures, aggregate
from trainer.sandbox.pool import NOT_TRIED


def reward(label: str, weight: float = 1.0) -> Any:
    """A reward function, of which a label and a weight are used here. Rewards are keys, so each is hashable."""
    return type("Reward", (SimpleNamespace,), {"__hash__": object.__hash__})(label=label, weight=weight)


def call(*indices: int) -> Any:
    return type("Call", (SimpleNamespace,), {"__hash__": object.__hash__})(indices=indices)


def test_terms_are_added_with_the_weights_of_their_rewards_where_their_calls_say():
    results = {
        reward("a", 2.0): {call(0, 2): [{"": 1.0}, {"x": 0.5, "y": 1.0}], call(1): [{"": 3.0}]},
        reward("b"): {call(0, 1, 2): [{"": 10.0}] * 3},
    }
    scores = aggregate(results, 3)
    assert scores.rewards == [12.0, 16.0, 13.0]
    assert scores.terms[2] == {"x": 0.5, "y": 1.0, "b": 10.0} and scores.terms[0] == {"a": 1.0, "b": 10.0}
    assert scores.reasons == ["", "", ""] and scores.failures == Failures()


def test_a_failure_keeps_the_terms_of_other_rewards_and_names_its_reward():
    results = {reward("a"): {call(0, 1): ["broke", {"": 1.0}]}, reward("b"): {call(0, 1): [{"": 2.0}, {"a": 5.0}]}}
    scores = aggregate(results, 2)
    assert scores.rewards == [2.0, 1.0]
    assert scores.reasons == ["a: broke", "b: returned a term a, as another reward does"]
    assert (scores.failures.count, scores.failures.first) == (2, "a: broke")
    alone = aggregate({reward("a"): {call(0): ["broke"]}}, 1)
    assert alone.reasons == ["broke"], "one reward needs no name"


@pytest.mark.parametrize("weight", [math.inf, 1e12])
def test_a_sum_that_no_loss_can_use_is_a_failure(weight):
    scores = aggregate({reward("a", weight): {call(0, 1): [{"": 1e6}, {"": 0.0}]}}, 2)
    assert scores.rewards[0] == 0.0 and "beyond 1e+12" in scores.reasons[0]


def test_failures_are_counted_with_those_that_were_not_tried():
    failures = Failures.among(["", "first", f"x {NOT_TRIED} y", ""])
    assert (failures.count, failures.first, failures.skipped) == (2, "first", 1)
    first, second = failures.lines(4, "zero", "step 3")
    assert first == "2 of 4 rewards of step 3 (50.0%) failed and count as 0; the first: first"
    assert second.startswith("1 of them were not tried: failed calls had already taken 30 times reward.timeout_s")
    assert Failures.among(["", ""]).lines(2, "zero", "") == []


def test_a_run_ends_when_more_than_the_limit_have_failed():
    failures = Failures.among(["x", "", ""], "environment")
    assert failures.problem(3, 0.5, "") is None and failures.problem(3, 1 / 3, "") is None
    sentence = failures.problem(3, 0.1, "step 2")
    assert sentence.startswith(
        "environment.max_error_rate=0.1: 1 of 3 episodes of step 2 (33.3%) failed (the first: x)"
    )


def test_failures_of_several_sources_name_the_one_with_the_most():
    some = [Failures.among(reasons, "environment") for reasons in (["x"], ["y", "z"], [""])]
    sentence = Failures.together(["a", "b", "c"], some).problem(6, 0.1, "step 2")
    assert "3 of 6 episodes of step 2 (50.0%) failed, 2 of them for b (the first: y); nothing was" in sentence
    assert "failed (the first: x)" in Failures.together([""], some[:1]).problem(6, 0.1, "step 2")
