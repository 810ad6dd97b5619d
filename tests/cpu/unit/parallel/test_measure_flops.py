"""The measured speed of matrix products."""

from __future__ import annotations

import pytest
import torch

from trainer.parallel.measure_flops import measure_peak


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_measured_peak_is_the_rate_of_the_fastest_product(dtype):
    assert 1e8 < measure_peak(dtype, "cpu", seconds=0.05) < 1e14
