"""Kernels whose results repeat to the last bit on a GPU."""

from __future__ import annotations

import torch


def use_deterministic_kernels(warn_only: bool = False) -> None:
    """Make this process use kernels whose results repeat.

    cuBLAS also needs `CUBLAS_WORKSPACE_CONFIG`, which must be set before CUDA starts (see `trainer.config.engines`).

    Args:
        warn_only: log a warning for an operator without such a kernel. False: the operator raises.
    """
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    # By default torch fills each new tensor. That takes time, and no tensor is read before it is written.
    torch.utils.deterministic.fill_uninitialized_memory = False
