"""The measured speed of matrix products."""

from __future__ import annotations

import torch

from tests.support.tables import table
from trainer.parallel.profiling import measure_peak


@table("dtype", [torch.float32, torch.bfloat16])
def test_the_measured_peak_is_the_rate_of_the_fastest_product(dtype):
    assert 1e8 < measure_peak(dtype, "cpu", seconds=0.05) < 1e14
