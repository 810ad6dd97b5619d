"""pass@k is the share of subsets with a success, and intervals cover the truth as often as they say."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.metrics.estimates import attempts_of, mean_estimate, pass_at_k, t_quantile


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_success(outcomes, data):
    k = data.draw(st.integers(1, len(outcomes)))
    subsets = list(itertools.combinations(outcomes, k))
    expected = sum(any(subset) for subset in subsets) / len(subsets)
    assert pass_at_k(sum(outcomes), len(outcomes), k) == pytest.approx(expected)


def test_pass_at_k_of_many_completions_is_exact():
    assert pass_at_k(0, 4096, 1024) == 0.0 and pass_at_k(4096, 4096, 1) == 1.0
    assert pass_at_k(1, 4096, 1024) == pytest.approx(0.25)


def test_the_k_are_powers_of_two_and_n():
    assert [attempts_of(n) for n in (1, 2, 3, 8, 12)] == [[], [2], [2, 3], [2, 4, 8], [2, 4, 8, 12]]


@pytest.mark.parametrize(
    ("degrees", "expected"), [(1, 12.7062), (2, 4.3027), (3, 3.1824), (5, 2.5706), (10, 2.2281), (100, 1.9840)]
)
def test_quantiles_agree_with_the_tables(degrees, expected):
    assert t_quantile(0.975, degrees) == pytest.approx(expected, rel=2e-3)


def coverage(estimate, truth: float, trials: int = 4000) -> float:
    return sum(low <= truth <= high for low, high in (estimate(i) for i in range(trials))) / trials


@pytest.mark.parametrize(("share", "rows"), [(0.5, 40), (0.9, 100), (0.03, 200)])
def test_the_interval_of_an_accuracy_covers_the_truth(share, rows):
    random = np.random.default_rng(1)

    def estimate(_: int) -> tuple[float, float]:
        found = mean_estimate((random.random(rows) < share).astype(float).tolist())
        return found.low, found.high

    assert 0.93 <= coverage(estimate, share) <= 0.975


@pytest.mark.parametrize("rows", [10, 100])
def test_the_interval_of_a_mean_covers_the_truth(rows):
    random = np.random.default_rng(2)

    def estimate(_: int) -> tuple[float, float]:
        found = mean_estimate(random.normal(0.5, 0.3, rows).tolist())
        return found.low, found.high

    assert 0.935 <= coverage(estimate, 0.5) <= 0.965


def test_an_interval_of_equal_values_still_says_how_few_they_were():
    few, many = mean_estimate([1.0] * 5), mean_estimate([1.0] * 500)
    assert few.value == many.value == 1.0 and few.high == pytest.approx(1.0) and few.low < 0.6 and many.low > 0.99
    assert mean_estimate([0.25]).low == -math.inf
