"""The overlong penalty and informative groups."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support import reference_algorithms as reference
from trainer.algorithms import (
    informative_groups,
    overlong_penalty,
    shape_rewards,
)


@given(st.integers(1, 100), st.integers(1, 50), st.floats(0, 2))
def test_overlong_penalty_is_its_formula(length, buffer, factor):
    found = overlong_penalty(torch.tensor([length]), 100, buffer, factor)
    assert found.item() == pytest.approx(reference.overlong_penalty(length, 100, buffer, factor), abs=1e-9)


def test_informative_groups_are_those_whose_rewards_differ():
    rewards, ids = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.5]), torch.tensor([7, 7, 2, 2, 9])
    assert informative_groups(rewards, ids).tolist() == [False, False, True, True, False]


def test_rewards_fall_over_the_last_tokens_before_the_limit():
    rewards, lengths = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.5], dtype=torch.float64), torch.tensor([1, 6, 7, 8, 10])
    assert shape_rewards(rewards, lengths, 10, 0, 0.8).tolist() == rewards.tolist()
    shaped = shape_rewards(rewards, lengths, 10, 4, 0.8)
    torch.testing.assert_close(
        shaped, torch.tensor([1.0, 1.0, -0.2, 0.6, -0.3], dtype=torch.float64), atol=1e-12, rtol=0
    )
    assert rewards.tolist() == [1.0, 1.0, 0.0, 1.0, 0.5]
