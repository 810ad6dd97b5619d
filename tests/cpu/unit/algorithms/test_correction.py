"""Corrections of rollouts against float64 loops written from the papers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import reference_algorithms as reference
from tests.support.algorithm_checks import CASES, assert_rows, rows
from tests.support.algorithm_checks import random_case as case
from tests.support.tables import table
from trainer.algorithms import (
    CORRECTIONS,
    LEVELS,
    correction_weights,
    train_inference_mismatch,
)


@table("level", LEVELS)
@table("kind", CORRECTIONS)
@settings(max_examples=25, deadline=None)
@given(
    shape=CASES,
    spread=st.sampled_from([0.1, 2.0, 40.0]),
    low=st.floats(0, 0.9),
    high=st.floats(1, 5),
)
def test_correction_weights_are_their_formulas(kind, level, shape, spread, low, high):
    mask, _, tensor = case(*shape)
    ours, engine = tensor(spread), tensor(spread)
    weights, bound = correction_weights(ours, engine, mask, kind=kind, level=level, low=low, high=high)
    assert_rows(
        weights, mask, reference.correction_weights(rows(ours, mask), rows(engine, mask), kind, level, low, high)
    )
    assert not bound[mask == 0].any()
    assert torch.equal(bound, (weights == (high if kind == "tis" else 0)) & (mask > 0))


@table("level", LEVELS)
@table("kind", CORRECTIONS)
def test_a_ratio_at_a_bound_is_within_it(kind, level):
    same, mask = torch.full((1, 2), -1.5), torch.ones(1, 2)
    weights, bound = correction_weights(same, same, mask, kind=kind, level=level, low=1.0, high=1.0)
    assert weights.tolist() == [[1.0, 1.0]] and not bound.any()


def test_one_extreme_token_counts_fully_in_its_sequence():
    ours, engine, mask = torch.zeros(1, 50), torch.zeros(1, 50), torch.ones(1, 50)
    ours[0, 7] = -60.0
    kept, bound = correction_weights(ours, engine, mask, kind="mis", level="geometric", low=0.5)
    assert bound.all() and not kept.any(), "exp(-60 / 50) = 0.30"


def test_mismatch_metrics_equal_numpy():
    rng = np.random.default_rng(0)
    engine = rng.normal(size=(20, 30)) - 2
    ours = engine + 0.1 * rng.normal(size=(20, 30))
    mask = (rng.random((20, 30)) < 0.8).astype(float)
    found = train_inference_mismatch(*(torch.from_numpy(x) for x in (ours, engine, mask)))
    a, b = ours[mask > 0], engine[mask > 0]
    rho = np.exp(a - b)
    expected = {
        "kl": np.mean(b - a),
        "k3_kl": np.mean(rho - 1 - np.log(rho)),
        "ratio_max": rho.max(),
        "ess": rho.sum() ** 2 / (len(rho) * (rho**2).sum()),
        "logprob_corr": np.corrcoef(a, b)[0, 1],
    }
    assert found == pytest.approx(expected, abs=1e-9)
    same = train_inference_mismatch(*(torch.from_numpy(x) for x in (ours, ours, mask)))
    assert (same["kl"], same["ess"], same["ratio_max"], same["logprob_corr"]) == pytest.approx((0, 1, 1, 1))
    assert train_inference_mismatch(torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(1, 2)) == {}
