"""Configs and clusters to plan for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from transformers import AutoConfig

from trainer.config import Config, compose
from trainer.plan.hardware import DEVICES, Cluster, Device


@pytest.fixture
def node() -> Cluster:
    """A node of eight H100."""
    return Cluster(1, 8, DEVICES["h100"])


@pytest.fixture
def cpu() -> Cluster:
    """A machine of two cores, whose speeds are not measured."""
    return Cluster(1, 2, Device("cpu", 24 * 10**9, 1e11, 3e11, 1e10, 1e9, 1e9, 1e10, 24 * 10**9, 1e10))


SMALL = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


@pytest.fixture
def save_config(tmp_path_factory) -> Callable[..., str]:
    """Write the config of a small model of a type of transformers; returns its directory."""

    def save(model_type: str, **values: int) -> str:
        path = str(tmp_path_factory.mktemp("model"))
        AutoConfig.for_model(model_type, **{**SMALL, **values}).save_pretrained(path)
        return path

    return save


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
