"""Fixtures of the GPU tests."""

from __future__ import annotations

import os

import pytest
import torch

from trainer.models.tiny import TinyShape, build_tiny


@pytest.fixture(scope="session")
def device() -> str:
    """`cuda`. TRAINER_GPU_CI_DEVICE=cpu tries the tests themselves on a machine without a GPU."""
    chosen = os.environ.get("TRAINER_GPU_CI_DEVICE", "cuda")
    if chosen == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return chosen


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory) -> str:
    """A Qwen3 of 0.1M parameters with random weights."""
    path = str(tmp_path_factory.mktemp("tiny"))
    build_tiny(TinyShape(hidden_size=64, intermediate_size=128, seed=3), path)
    return path


@pytest.fixture(scope="session")
def wide_path(tmp_path_factory) -> str:
    """A Qwen3 of 13M parameters with random weights, so that weights count beside what every process needs."""
    path = str(tmp_path_factory.mktemp("wide"))
    build_tiny(TinyShape(hidden_size=512, intermediate_size=1536, num_layers=4, seed=3), path)
    return path
