"""How fast a device can compute."""

from __future__ import annotations

import statistics
import time

import torch


def measure_peak(dtype: torch.dtype, device: str, seconds: float = 0.2) -> float:
    """Return the FLOP/s of square matrix products of `dtype` on this process's threads or GPU: the best of some.

    The matrices are large enough for products to be limited by arithmetic, not by memory.
    """
    size = 8192 if device == "cuda" else 1024
    return 2 * size**3 / min(_time_products(size, dtype, device, seconds))


def measure_speed(dtype: torch.dtype, device: str, seconds: float = 0.5) -> float:
    """Return the FLOP/s of matrix products of `dtype` on average. What slows this process down lowers it.

    It needs 100 MB on a GPU.
    """
    size = 4096 if device == "cuda" else 512
    return 2 * size**3 / statistics.fmean(_time_products(size, dtype, device, seconds))


def _time_products(size: int, dtype: torch.dtype, device: str, seconds: float) -> list[float]:
    """Return the seconds of each of the products that fit into so many seconds."""
    left = torch.ones(size, size, dtype=dtype, device=device)
    product = left @ left  # the first one loads the library
    times, end = [], time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        begin = time.perf_counter()
        torch.mm(left, left, out=product)
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return times
