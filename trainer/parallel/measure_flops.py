"""Measure how fast a device computes matrix products."""

from __future__ import annotations

import time

import torch


def measure_peak(dtype: torch.dtype, device: str, seconds: float = 0.2) -> float:
    """Return the highest FLOP/s of several square matrix products of `dtype` on this process's threads or GPU.

    The matrices are large enough for the products to be limited by arithmetic and not by memory bandwidth.
    """
    size = 8192 if device == "cuda" else 1024
    return 2 * size**3 / min(_time_products(size, dtype, device, seconds))


def _time_products(size: int, dtype: torch.dtype, device: str, seconds: float) -> list[float]:
    """Return the duration of each product, in seconds. Products run until `seconds` have passed."""
    matrix = torch.ones(size, size, dtype=dtype, device=device)
    product = matrix @ matrix  # the first product loads the library
    times, end = [], time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        begin = time.perf_counter()
        torch.mm(matrix, matrix, out=product)
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return times
