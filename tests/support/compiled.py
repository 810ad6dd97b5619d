"""`torch.compile` without the minutes in which a C++ compiler makes kernels."""

from __future__ import annotations

import functools

import pytest
import torch


def without_kernels(patch: pytest.MonkeyPatch) -> None:
    """Let `torch.compile` trace, decompose and partition graphs as inductor does, and run them operator by operator.

    How many graphs there are, and what a forward pass saves for the backward pass, is decided before kernels are made.
    """
    patch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager_decomp_partition"))
