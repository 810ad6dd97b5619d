"""FSDP gathers the parameters of blocks ahead of use, in the order in which they run."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests.support.fsdp import gathers, in_order, prefetches
from tests.support.ranks import run_ranks
from tests.support.roles import roles
from tests.support.tables import table
from tests.support.training import GROUPS, config, make_batch, update
from tests.support.whole_batches import compute_batch, share_of
from trainer.algorithms import Totals
from trainer.config import FSDPConfig, policy_role, reference_role
from trainer.models.tiny import TinyShape, build_tiny
from trainer.parallel import shard
from trainer.parallel.shard import frees_after_forward, prefetch_depth
from trainer.workers.rank import Rank

LAYERS = [f"model.layers.{i}" for i in range(4)]


def record_a_step(rank: Rank, path: str, depth: int) -> dict[str, Any]:
    """A step of the policy: what was gathered ahead, and the metrics and weights."""
    shard.prefetch_depth = lambda *_: depth
    rank.build(roles(rank.cfg, ["policy"]), path)
    metrics: dict[str, float] = {}
    forward, backward = prefetches(lambda: metrics.update(update(rank, "policy", make_batch(), 1)))
    weights = [p.full_tensor() for p in rank.roles["policy"].module.parameters()]
    return {"result": (metrics, weights), "forward": forward, "backward": backward}


def test_prefetching_follows_the_order_of_execution_with_the_same_bits(tmp_path):
    build_tiny(TinyShape(hidden_size=32, intermediate_size=64, num_layers=len(LAYERS), seed=3), str(tmp_path))
    cfg = config(mini_batch_size=GROUPS)
    runs = {}
    for depth, mode in ((0, "none"), (2, "none"), (1, "full")):
        cfg.trainer.policy.fsdp = FSDPConfig(activation_checkpointing=mode)
        runs[depth] = run_ranks(2, record_a_step, str(tmp_path), depth, cfg=cfg)[0]
    for depth, run in runs.items():
        assert run["forward"] == in_order(["", *LAYERS], depth)
        assert run["backward"] == in_order(["", *reversed(LAYERS)], max(depth, 1))  # torch looks one block ahead itself
        assert list(run["forward"]) == ["", *LAYERS] and list(run["backward"]) == ["", *reversed(LAYERS)]
        (metrics, weights), (expected_metrics, expected_weights) = run["result"], runs[0]["result"]
        assert metrics == expected_metrics
        assert all(map(torch.equal, weights, expected_weights))


def count_gathers(rank: Rank, path: str) -> dict[str, Any]:
    """A pass without gradients and an update of three micro-batches in one mini-batch, twice."""
    rank.build(roles(rank.cfg, ["policy"]), path)
    module, batch, metrics = rank.roles["policy"].module, make_batch(), []
    scores, updates, left = [], [], []
    for step in (1, 2):
        scores.append(gathers(lambda: compute_batch(rank, "policy", "logprobs", batch)))
        left.append(is_gathered(module))
        updates.append(gathers(lambda step=step: metrics.append(update(rank, "policy", batch, step))))
    weights = [parameter.full_tensor() for parameter in module.parameters()]
    return {"scores": scores, "update": updates, "left": left, "metrics": metrics, "weights": weights}


def is_gathered(module: nn.Module) -> bool:
    return any(not isinstance(parameter, DTensor) for parameter in module.parameters())


def test_weights_that_stay_are_gathered_once_for_all_micro_batches(tmp_path):
    build_tiny(TinyShape(hidden_size=32, intermediate_size=64, num_layers=2, seed=3), str(tmp_path))
    cfg = config(mini_batch_size=GROUPS, max_tokens_per_micro_batch=100)
    runs = {}
    for frees in (True, False):
        cfg.trainer.policy.fsdp = FSDPConfig(reshard_after_forward=frees)
        runs[frees] = run_ranks(2, count_gathers, str(tmp_path), cfg=cfg)[0]
    freed, kept = runs[True], runs[False]
    for block in LAYERS[:2]:
        for scores, updated, again, once in zip(
            freed["scores"], freed["update"], kept["scores"], kept["update"], strict=True
        ):
            micro_batches = scores[block]
            assert micro_batches > 1 and updated[block] == 2 * micro_batches
            assert again[block] == once[block] == 1
    assert kept["left"] == [False, False]  # engines and other roles get the memory after a pass
    assert kept["metrics"] == freed["metrics"]
    assert all(map(torch.equal, kept["weights"], freed["weights"]))


@table(
    "setting, device, shards, offload, trained_whole, expected",
    [
        (None, "cuda", 1, False, True, False),
        (None, "cuda", 1, False, False, True),  # a second copy of frozen weights
        (None, "cuda", 1, True, True, True),
        (None, "cuda", 2, False, True, True),
        (None, "cpu", 1, False, True, True),
        (True, "cuda", 1, False, True, True),
        (False, "cuda", 8, False, False, False),
    ],
)
def test_only_one_gpu_keeps_what_it_has_gathered(setting, device, shards, offload, trained_whole, expected):
    config = FSDPConfig(reshard_after_forward=setting, cpu_offload=offload)
    assert frees_after_forward(config, device, shards, trained_whole) is expected


def left_gathered(rank: Rank, path: str) -> dict[str, bool]:
    """Whether weights are still gathered after each kind of pass of adapters and of the model below them."""
    rank.build([policy_role(rank.cfg), reference_role(rank.cfg)], path)
    worker, batch, found = rank.roles["policy"], make_batch(), {}
    assert rank.roles["reference"].module is worker.module
    for role in ("policy", "reference"):
        compute_batch(rank, role, "logprobs", batch)
        found[role] = is_gathered(worker.module)
    share = share_of(rank, "policy", batch, [np.arange(len(batch["input_ids"]))])
    worker.evaluate(share, Totals.of(torch.from_numpy(batch["mask"])), worker.objective.numbers())
    return {**found, "evaluation": is_gathered(worker.module)}


def test_no_pass_leaves_weights_gathered(tmp_path):
    build_tiny(TinyShape(hidden_size=32, intermediate_size=64, num_layers=2, seed=3), str(tmp_path))
    cfg = config()
    cfg.trainer.policy.lora.rank = 4
    cfg.trainer.policy.fsdp = FSDPConfig(reshard_after_forward=False)
    for found in run_ranks(2, left_gathered, str(tmp_path), cfg=cfg):
        assert found == {"policy": False, "reference": False, "evaluation": False}


@table("device, shards, expected", [("cuda", 8, 1), ("cuda", 1, 0), ("cpu", 8, 0)])
def test_prefetch_depth(device, shards, expected):
    assert prefetch_depth(device, shards) == expected
