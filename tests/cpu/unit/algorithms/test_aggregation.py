"""The mean of token losses, by each of its definitions, and that it does not depend on how a batch is split."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.tables import table
from trainer.algorithms.aggregation import AGGREGATIONS, Totals, aggregate, masked
from trainer.config import algorithm

VALUES = torch.tensor([[1.0, 2.0, 3.0, 100.0], [5.0, 100.0, 100.0, 100.0], [100.0, 100.0, 100.0, 100.0]])
MASK = torch.tensor([[1.0, 1.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])


@table(
    "kind, mean",
    [
        ("token_mean", (1 + 2 + 3 + 5) / 4),
        ("seq_mean_token_mean", (2 + 5) / 2),
        ("seq_mean_token_sum", (6 + 5) / 2),
        ("seq_mean_token_sum_norm", (6 + 5) / 2 / 4),
    ],
)
def test_each_mean_is_its_formula_over_sequences_that_have_a_token(kind, mean):
    assert aggregate(VALUES, MASK, kind).item() == pytest.approx(mean)
    assert aggregate(VALUES, torch.zeros(3, 4), kind).item() == 0


def test_totals_count_tokens_and_the_sequences_that_have_some():
    assert Totals.of(MASK) == Totals(tokens=4, sequences=2, max_tokens=4)
    assert Totals.of(MASK, max_tokens=9).max_tokens == 9


def test_totals_are_exact_in_any_dtype_of_the_mask():
    """A sum of 300 ones in bfloat16 is 256."""
    assert Totals.of(torch.ones(1, 300, dtype=torch.bfloat16)).tokens == 300


@table("kind", AGGREGATIONS)
@settings(max_examples=20, deadline=None)
@given(mask=st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=6), data=st.data())
def test_terms_of_micro_batches_add_up_to_the_mean_of_the_batch(kind, mask, data):
    mask = torch.tensor(mask).double()
    values = torch.arange(mask.numel(), dtype=torch.float64).view_as(mask)
    pieces = torch.arange(len(mask)).tensor_split(data.draw(st.integers(1, len(mask))))
    terms = [aggregate(values[piece], mask[piece], kind, Totals.of(mask)).item() for piece in pieces]
    assert sum(terms) == pytest.approx(aggregate(values, mask, kind).item())


@table("value", [float("inf"), float("nan")])
def test_values_outside_the_mask_reach_neither_the_mean_nor_its_gradient(value):
    values = torch.where(MASK > 0, VALUES, value).requires_grad_()
    assert torch.equal(masked(values, MASK), VALUES * MASK)
    aggregate(values, MASK).backward()
    assert torch.equal(values.grad, MASK / 4)


def test_an_unknown_mean_is_refused_with_its_key():
    with pytest.raises(ValueError, match=r"^algorithm.aggregation=mean: choose one of token_mean, "):
        aggregate(VALUES, MASK, "mean")


def test_the_config_knows_the_same_names():
    """It lists them itself, because it does not import torch."""
    assert algorithm.AGGREGATIONS == AGGREGATIONS
