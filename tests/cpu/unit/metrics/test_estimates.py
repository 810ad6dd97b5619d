"""pass@k is the share of subsets with a success, and intervals cover the truth as often as they say."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.metrics.estimates import attempts_of, mean_estimate, paired_difference, pass_at_k, t_quantile


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
def test_the_interval_of_a_paired_difference_covers_the_truth(rows):
    """Rows are of different difficulty, and b is better by 0.05; the difficulty cancels out."""
    random = np.random.default_rng(2)
    widths = []

    def estimate(_: int) -> tuple[float, float]:
        difficulty = random.normal(0.5, 0.3, rows)
        a, b = difficulty + random.normal(0, 0.1, rows), difficulty + 0.05 + random.normal(0, 0.1, rows)
        found = paired_difference(a.tolist(), b.tolist())
        widths.append(found.high - found.low)
        return found.low, found.high

    assert 0.935 <= coverage(estimate, 0.05) <= 0.965
    assert np.mean(widths) < 2 * 2.3 * math.sqrt(2 * 0.1**2 / rows), "it does not hold the spread of the difficulty"


@pytest.mark.parametrize(("rows", "a", "b"), [(20, 0.02, 0.02), (20, 0.3, 0.6), (200, 0.05, 0.08)])
def test_the_interval_of_a_difference_of_shares_covers_the_truth(rows, a, b):
    random = np.random.default_rng(4)

    def estimate(_: int) -> tuple[float, float]:
        found = paired_difference(*((random.random(rows) < share).astype(float).tolist() for share in (a, b)), True)
        return found.low, found.high

    assert coverage(estimate, b - a) >= 0.935


def test_rows_that_nobody_solves_do_not_show_that_nothing_differs():
    """20 rows may hide some points of difference, and 2,000 rows less than one."""
    few, many = (paired_difference([0.0] * rows, [0.0] * rows, True) for rows in (20, 2000))
    assert few.value == 0.0 and few.high == -few.low and 0.05 < few.high < 0.15 and 0.0 < many.high < 0.002
    by_hand = [0.0, 1.0, 1.0, 1.0], [1.0, 1.0, 0.0, 1.0]  # one row each way of four
    assert paired_difference(*by_hand, True).high == pytest.approx(1.959964 * math.sqrt(3) / 6, rel=1e-6)


def test_no_difference_is_distinguishable_in_about_one_of_twenty_comparisons():
    random = np.random.default_rng(3)

    def found(_: int) -> bool:
        difficulty = random.random(200)
        a, b = (np.mean(random.random((4, 200)) < difficulty, axis=0).tolist() for _ in range(2))
        return paired_difference(a, b).excludes_zero

    assert 0.035 <= sum(map(found, range(2000))) / 2000 <= 0.065


def test_an_interval_of_equal_values_still_says_how_few_they_were():
    few, many = mean_estimate([1.0] * 5), mean_estimate([1.0] * 500)
    assert few.value == many.value == 1.0 and few.high == pytest.approx(1.0) and few.low < 0.6 and many.low > 0.99
    assert mean_estimate([0.25]).low == -math.inf and not paired_difference([0.0], [1.0]).excludes_zero
    assert not paired_difference([0.5, 1.0], [0.5, 1.0]).excludes_zero


@pytest.mark.parametrize(("a", "b"), [(0.0, 1.0), (1.0, 0.0), (0.1, 0.4)])
def test_rows_that_all_differ_by_the_same_tell_something_from_six_on(a, b):
    assert [paired_difference([a] * n, [b] * n).excludes_zero for n in (2, 5, 6)] == [False, False, True]
    assert not paired_difference([0.1, 0.2], [0.3, 0.4]).excludes_zero, "0.2 twice, but for the rounding"
