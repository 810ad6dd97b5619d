"""The smallest changes that make a run fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainer.errors import UserError
from trainer.plan.advice import find_changes, larger_cluster, with_changes
from trainer.plan.hardware import Cluster
from trainer.plan.plan import make_plan


def test_each_change_is_needed_and_together_they_suffice(cfg, node):
    cfg.model.path = "Qwen/Qwen3-8B"
    cfg.trainer.offload, cfg.rollout.gpu_memory_utilization = "none", 0.9
    cfg.trainer.max_tokens_per_micro_batch = 65536
    assert not make_plan(cfg, node).fits
    changes = find_changes(cfg, node)
    assert changes
    assert make_plan(with_changes(cfg, changes), node).fits
    for key in changes:
        fewer = {other: value for other, value in changes.items() if other != key}
        assert not make_plan(with_changes(cfg, fewer), node).fits


def test_an_engine_that_is_too_large_gets_more_gpus(cfg, node):
    cfg.model.path = "meta-llama/Llama-3.3-70B-Instruct"
    cfg.rollout.colocate, cfg.trainer.offload = False, "none"
    cfg.trainer.num_workers, cfg.rollout.num_engines, cfg.rollout.gpu_memory_utilization = 32, 8, 0.92
    changes = find_changes(cfg, Cluster(5, 8, node.device))
    assert changes is not None and changes["rollout.tensor_parallel_size"] == 2


def test_too_few_gpus_are_shared(cfg, node):
    one = Cluster(1, 1, node.device)
    cfg.rollout.colocate, cfg.trainer.offload = False, "none"
    for cluster, count in ((one, 1), (node, 8)):
        cfg.trainer.num_workers = cfg.rollout.num_engines = count
        assert find_changes(cfg, cluster) == {"rollout.colocate": True}
    cfg.rollout.ahead = 1  # which needs GPUs of its own
    assert find_changes(cfg, node) is None
    assert larger_cluster(cfg, node) == (Cluster(2, 8, node.device), {})


def test_what_no_change_makes_fit_needs_a_larger_cluster(cfg, node):
    cfg.model.path = "Qwen/Qwen3-8B"
    cfg.trainer.num_workers = cfg.rollout.num_engines = 1
    cfg.trainer.offload = "none"
    one = Cluster(1, 1, replace(node.device, host_memory=100 * 10**9))
    assert find_changes(cfg, one) is None
    larger = larger_cluster(cfg, one)
    assert larger is not None and larger[0].gpus > 1 and larger[1]["trainer.num_workers"] == larger[0].gpus


def test_changes_obey_the_schema(cfg):
    assert with_changes(cfg, {"trainer.offload": "none"}).trainer.offload == "none" != cfg.trainer.offload
    with pytest.raises(UserError):
        with_changes(cfg, {"rollout.colocate": False})  # trainer.offload needs it
