"""What is done to the blocks of a model changes memory and time, and not the results."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.memory import peak_bytes
from tests.support.ranks import run_ranks
from tests.support.training import config, make_batch, update
from trainer.config import FSDPConfig, TinyConfig
from trainer.models.tiny import build_tiny
from trainer.workers.rank import Rank


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("model"))
    build_tiny(TinyConfig(hidden_size=64, intermediate_size=128, num_layers=8, seed=3), path)
    return path


def train_a_step(rank: Rank, path: str) -> dict[str, Any]:
    """A step of policy and critic; returns metrics, weights, and the peak memory of the policy's next update."""
    rank.build(["policy", "critic"], path)
    metrics = [update(rank, role, make_batch(), 1) for role in ("policy", "critic")]
    weights = [p.full_tensor() for worker in rank.roles.values() for p in worker.module.parameters()]
    peak = peak_bytes(lambda: update(rank, "policy", make_batch(), 2))
    return {"metrics": metrics, "weights": weights, "peak": peak}


def results_of(path: str, **fsdp: Any) -> dict[str, Any]:
    cfg = config()
    cfg.trainer.policy.fsdp, cfg.trainer.critic.fsdp = FSDPConfig(**fsdp), FSDPConfig(**fsdp)
    return run_ranks(2, train_a_step, path, cfg=cfg)[0]


def test_recomputed_activations_take_less_memory_and_give_the_same_bits(model_path):
    modes = {mode: results_of(model_path, activation_checkpointing=mode) for mode in ("none", "selective", "full")}
    for result in modes.values():
        assert result["metrics"] == modes["none"]["metrics"]
        assert all(map(torch.equal, result["weights"], modes["none"]["weights"]))
    peaks = {mode: result["peak"] for mode, result in modes.items()}
    assert peaks["selective"] < 0.75 * peaks["none"] and peaks["full"] < 0.75 * peaks["selective"], peaks
