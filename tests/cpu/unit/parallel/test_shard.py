"""FSDP gathers the parameters of blocks ahead of use, in the order in which they run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.fsdp import in_order, prefetches
from tests.support.ranks import run_ranks
from tests.support.roles import roles
from tests.support.training import GROUPS, config, make_batch, update
from trainer.config import FSDPConfig, TinyConfig
from trainer.models.tiny import build_tiny
from trainer.parallel.shard import prefetch_depth
from trainer.workers.rank import Rank

LAYERS = [f"model.layers.{i}" for i in range(4)]


def record_a_step(rank: Rank, path: str) -> dict[str, Any]:
    """A step of the policy: what was gathered ahead, and the metrics and weights."""
    rank.build(roles(rank.cfg, ["policy"]), path)
    metrics: dict[str, float] = {}
    forward, backward = prefetches(lambda: metrics.update(update(rank, "policy", make_batch(), 1)))
    weights = [p.full_tensor() for p in rank.roles["policy"].module.parameters()]
    return {"result": (metrics, weights), "forward": forward, "backward": backward}


def test_prefetching_follows_the_order_of_execution_with_the_same_bits(tmp_path):
    build_tiny(TinyConfig(hidden_size=32, intermediate_size=64, num_layers=len(LAYERS), seed=3), str(tmp_path))
    cfg = config(mini_batch_size=GROUPS)
    runs = {}
    for depth, mode in ((0, "none"), (2, "none"), (1, "full")):
        cfg.trainer.policy.fsdp = FSDPConfig(prefetch=depth, activation_checkpointing=mode)
        runs[depth] = run_ranks(2, record_a_step, str(tmp_path), cfg=cfg)[0]
    for depth, run in runs.items():
        assert run["forward"] == in_order(["", *LAYERS], depth)
        assert run["backward"] == in_order(["", *reversed(LAYERS)], max(depth, 1))  # torch looks one block ahead itself
        assert list(run["forward"]) == ["", *LAYERS] and list(run["backward"]) == ["", *reversed(LAYERS)]
        (metrics, weights), (expected_metrics, expected_weights) = run["result"], runs[0]["result"]
        assert metrics == expected_metrics
        assert all(map(torch.equal, weights, expected_weights))


@pytest.mark.parametrize(
    "setting, device, shards, expected",
    [(None, "cuda", 8, 1), (None, "cuda", 1, 0), (None, "cpu", 8, 0), (3, "cpu", 1, 3), (0, "cuda", 8, 0)],
)
def test_prefetch_depth(setting, device, shards, expected):
    assert prefetch_depth(FSDPConfig(prefetch=setting), device, shards) == expected
