"""Configs and clusters to plan for."""

from __future__ import annotations

import pytest

from trainer.config import Config, compose
from trainer.plan.hardware import DEVICES, Cluster, Device


@pytest.fixture
def node() -> Cluster:
    """A node of eight H100."""
    return Cluster(1, 8, DEVICES["h100"])


@pytest.fixture
def cpu() -> Cluster:
    """A machine of two cores, whose speeds are not measured."""
    return Cluster(1, 2, Device("cpu", 24 * 10**9, 1e11, 3e11, 1e10, 1e9, 1e9, 1e10, 24 * 10**9))


@pytest.fixture
def cfg() -> Config:
    """A run of Qwen3-0.6B on a node of eight GPUs, which ranks and engines share."""
    return compose(
        [
            "data=gsm8k",
            "algorithm.kl_coef=0",
            "model.path=Qwen/Qwen3-0.6B",
            "trainer.num_workers=8",
            "trainer.offload=all",
            "rollout.num_engines=8",
            "rollout.colocate=true",
            "rollout.gpu_memory_utilization=0.6",
            "rollout.max_prompt_tokens=512",
            "rollout.max_response_tokens=512",
        ]
    )
