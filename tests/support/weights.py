"""Weights of many types and sizes, on their way from a rank to an engine."""

from __future__ import annotations

import torch
from torch import Tensor

BUCKET = 4096
"""Bytes. Some of the tensors are larger."""
_SHAPES = {"scalar": (), "vector": (7,), "empty": (0, 3), "matrix": (33, 129), "large": (70, 500), "last": (2,)}
_TYPES = (torch.float32, torch.bfloat16, torch.int64)


def make_weights(version: int, device: str = "cpu") -> dict[str, Tensor]:
    """Return tensors by name, other ones for each version."""
    generator = torch.Generator().manual_seed(version)
    return {
        f"{name}.{str(dtype).removeprefix('torch.')}": (100 * torch.randn(shape, generator=generator)).to(device, dtype)
        for name, shape in _SHAPES.items()
        for dtype in _TYPES
    }


def assert_equal(found: list[tuple[str, Tensor]], expected: dict[str, Tensor]) -> None:
    assert [name for name, _ in found] == list(expected)
    for name, tensor in found:
        assert tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name]), name
