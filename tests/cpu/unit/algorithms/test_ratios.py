"""Ratios of probabilities: the widest dtype, infinite log-probs, and the largest ratio."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.tables import table
from trainer.algorithms.kl import at_least_float32, clamp_log_ratio, is_clamped, log_ratio, max_log_ratio

HALF, SINGLE, DOUBLE = torch.bfloat16, torch.float32, torch.float64
INFINITE = -math.inf


@table("dtypes, widest", [((HALF, HALF), SINGLE), ((HALF, SINGLE), SINGLE), ((SINGLE, DOUBLE), DOUBLE)])
def test_ratios_are_computed_in_the_widest_dtype_and_at_least_float32(dtypes, widest):
    tensors = at_least_float32(*(torch.ones(1, dtype=dtype) for dtype in dtypes))
    assert [tensor.dtype for tensor in tensors] == [widest, widest]
    assert log_ratio(*(torch.ones(1, dtype=dtype) for dtype in dtypes)).dtype == widest


def test_a_small_difference_of_half_precision_log_probs_is_exact():
    logprobs, baseline = torch.tensor([-100.0], dtype=HALF), torch.tensor([-0.00390625], dtype=HALF)
    assert log_ratio(logprobs, baseline).item() == -99.99609375  # bfloat16 would round it to -100


def test_infinite_log_probs_on_both_sides_are_a_ratio_of_one():
    """Both policies exclude the token. One infinite side stays infinite."""
    found = log_ratio(torch.tensor([INFINITE, INFINITE, -1.0]), torch.tensor([INFINITE, -1.0, INFINITE]))
    assert found.tolist() == [0.0, -math.inf, math.inf]


def test_infinite_log_probs_outside_the_mask_have_ratio_0_and_gradient_0():
    logprobs = torch.tensor([-1.0, INFINITE, math.nan], requires_grad=True)
    found = log_ratio(logprobs, torch.tensor([-2.0, -1.0, -1.0]), torch.tensor([1.0, 0.0, 0.0]))
    found.sum().backward()
    assert found.tolist() == [1.0, 0.0, 0.0] and logprobs.grad.tolist() == [1.0, 0.0, 0.0]


@table("dtype, largest", [(SINGLE, 22), (DOUBLE, 177)])
def test_the_largest_ratio_can_be_squared_and_summed(dtype, largest):
    assert int(max_log_ratio(dtype)) == largest
    ratio = torch.tensor(max_log_ratio(dtype), dtype=dtype).exp()
    assert torch.isfinite(ratio**2 * 10**9)


def test_ratios_beyond_the_largest_are_clamped_and_have_no_gradient():
    largest = max_log_ratio(SINGLE)
    values = torch.tensor([-1e4, -largest, 0.5, largest, 1e4], requires_grad=True)
    clamped = clamp_log_ratio(values)
    clamped.sum().backward()
    assert clamped.tolist() == pytest.approx([-largest, -largest, 0.5, largest, largest])
    assert is_clamped(values).tolist() == [True, False, False, False, True]
    assert values.grad.tolist() == [0.0, 1.0, 1.0, 1.0, 0.0]
