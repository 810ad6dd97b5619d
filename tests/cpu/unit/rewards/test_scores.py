"""Weighted sums of rewards and the failures among them."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from trainer.rewards.scoring import aggregate


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
    assert scores.reasons == ["", "", ""]


def test_a_failure_keeps_the_terms_of_other_rewards_and_names_its_reward():
    results = {reward("a"): {call(0, 1): ["broke", {"": 1.0}]}, reward("b"): {call(0, 1): [{"": 2.0}, {"a": 5.0}]}}
    scores = aggregate(results, 2)
    assert scores.rewards == [2.0, 1.0]
    assert scores.reasons == ["a: broke", "b: returned a term a, as another reward does"]
    alone = aggregate({reward("a"): {call(0): ["broke"]}}, 1)
    assert alone.reasons == ["broke"], "one reward needs no name"


@pytest.mark.parametrize("weight", [math.inf, 1e12])
def test_a_sum_that_no_loss_can_use_is_a_failure(weight):
    scores = aggregate({reward("a", weight): {call(0, 1): [{"": 1e6}, {"": 0.0}]}}, 2)
    assert scores.rewards[0] == 0.0 and "beyond 1e+12" in scores.reasons[0]
