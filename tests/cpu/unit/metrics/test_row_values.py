"""The measures of validation rows."""

from __future__ import annotations

import pytest

from trainer.metrics.estimates import means_of, row_values


def test_rows_count_alike_whatever_fails_in_them():
    values = row_values([[1.0, 0.5, None, 1.0], [0.0, 0.0, 0.0, 1.0], [None] * 4], threshold=1.0)
    assert values["accuracy"] == {0: pytest.approx(2 / 3), 1: 0.25}, "a row of failures has no value"
    assert values["avg@4"] == {0: pytest.approx(2.5 / 3), 1: 0.25}
    assert values["pass@2"] == {0: 1.0, 1: 0.5} and values["pass@4"] == {1: 1.0}, "three completions have no pass@4"
    assert means_of(values)["accuracy"] == pytest.approx((2 / 3 + 0.25) / 2)


def test_one_completion_has_an_accuracy_and_a_mean_reward():
    values = row_values([[3.0], [2.0]], threshold=3.0)
    assert values == {"accuracy": {0: 1.0, 1: 0.0}, "avg@1": {0: 3.0, 1: 2.0}}
    assert means_of(row_values([[None]], 1.0)) == {}
