"""Results that repeat to the last bit on a GPU."""

from __future__ import annotations

import torch


def use_deterministic_kernels(warn_only: bool = False) -> None:
    """Let this process compute with kernels whose results repeat.

    cuBLAS needs `CUBLAS_WORKSPACE_CONFIG` besides, before CUDA starts (see `trainer.config.engines`).

    Args:
        warn_only: warn of an operator that has no such kernel. false: it raises.
    """
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    # Else each new tensor is filled, which takes time and hides no mistake of ours: nothing reads one before it is
    # written.
    torch.utils.deterministic.fill_uninitialized_memory = False
