"""How fast a device can compute."""

from __future__ import annotations

import time

import torch


def measure_peak(dtype: torch.dtype, device: str, seconds: float = 0.2) -> float:
    """Return the FLOP/s of square matrix products of `dtype` on this process's threads or GPU: the best of some.

    The matrices are large enough for products to be limited by arithmetic, not by memory.
    """
    size = 8192 if device == "cuda" else 1024
    left = torch.ones(size, size, dtype=dtype, device=device)
    product = left @ left  # the first one loads the library
    fastest, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        begin = time.perf_counter()
        torch.mm(left, left, out=product)
        if device == "cuda":
            torch.cuda.synchronize()
        fastest = min(fastest, time.perf_counter() - begin)
    return 2 * size**3 / fastest
