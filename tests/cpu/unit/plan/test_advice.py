"""The smallest changes that make a run fit."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from trainer.config import Config, compose
from trainer.errors import UserError
from trainer.plan import activations, advice
from trainer.plan.advice import find_changes, larger_cluster, with_changes
from trainer.plan.hardware import Cluster, parse_cluster
from trainer.plan.levers import joined, layouts, levers, splits
from trainer.plan.plan import make_plan

MOST_TRACES = 60
MOST_TRACES_OF_LONGEST = 28


LLAMA = ("model.path=meta-llama/Llama-3.3-70B-Instruct", "data=gsm8k")
CONFIGS = {
    "micro-batches": (
        "8xH100",
        "model=qwen3_0.6b",
        "data=gsm8k",
        "trainer.num_workers=4",
        "rollout.num_engines=4",
        "trainer.max_tokens_per_micro_batch=131072",
    ),
    "engines": ("64x8xH100", *LLAMA, "trainer.num_workers=64", "rollout.num_engines=64"),
    "too few GPUs": ("8x8xH100", *LLAMA, "trainer.num_workers=64", "rollout.num_engines=64"),
    "one engine": (
        "5x8xH100",
        *LLAMA,
        "trainer.num_workers=32",
        "rollout.num_engines=1",
        "trainer.policy.fsdp.activation_checkpointing=full",
    ),
    "critic": (
        "8xH100",
        "model.path=Qwen/Qwen3-4B",
        "data=gsm8k",
        "algorithm=ppo",
        "trainer.num_workers=8",
        "rollout.num_engines=8",
        "rollout.colocate=true",
    ),
    "long sequences": (
        "8xH100",
        "model.path=Qwen/Qwen3-8B",
        "data=gsm8k",
        "algorithm.kl_coef=0",
        "trainer.num_workers=8",
        "rollout.num_engines=8",
        "rollout.colocate=true",
        "trainer.offload=all",
        "rollout.max_response_tokens=131072",
    ),
    "supervised": ("4xH100", "trainer.task=sft", "model.path=Qwen/Qwen3-14B", "data=gsm8k", "trainer.num_workers=1"),
}


def config_and_cluster(name: str) -> tuple[Config, Cluster]:
    gpus, *words = CONFIGS[name]
    return compose(words), parse_cluster(gpus)


def fits(cfg: Config, cluster: Cluster, changes: Mapping[str, Any]) -> bool:
    try:
        return make_plan(with_changes(cfg, changes), cluster).fits
    except UserError:
        return False


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_proposed_fits_and_no_part_of_it_does(name):
    cfg, cluster = config_and_cluster(name)
    assert not make_plan(cfg, cluster).fits
    changes = find_changes(cfg, cluster)
    if changes is None:
        larger = larger_cluster(cfg, cluster)
        assert larger is not None
        cluster, changes = larger
    assert fits(cfg, cluster, changes)
    for count in range(len(changes)):
        for keys in itertools.combinations(changes, count):
            assert not fits(cfg, cluster, {key: changes[key] for key in keys}), keys


def test_no_fewer_changes_fit(cfg, node):
    cfg.model.path = "Qwen/Qwen3-8B"
    cfg.trainer.offload, cfg.rollout.gpu_memory_utilization = "none", 0.9
    cfg.trainer.max_tokens_per_micro_batch = 65536
    changes = find_changes(cfg, node)
    assert changes is not None and len(changes) > 1
    singles = [layout for layout in layouts(cfg, node) if len(layout) == 1]
    singles += [change for lever in levers(cfg, node, True) for change in lever.options]
    singles += [{"rollout.gpu_memory_utilization": share / 100} for share in range(5, 95, 5)]
    for count in range(1, len(changes)):
        for parts in itertools.combinations(singles, count):
            assert not fits(cfg, node, joined(parts)), parts


def test_one_change_is_enough_for_large_micro_batches():
    changes = find_changes(*config_and_cluster("micro-batches"))
    assert changes is not None and len(changes) == 1


def test_long_sequences_are_split_over_ranks_if_nothing_else_helps(monkeypatch):
    cfg, cluster = config_and_cluster("long sequences")
    changes = find_changes(cfg, cluster)
    key = "trainer.context_parallel_size"
    assert changes is not None and changes[key] == 2
    cfg.trainer.max_tokens_per_micro_batch = cfg.longest_sequence
    monkeypatch.setattr(advice, "splits", lambda *_: [])
    assert find_changes(cfg, cluster) is None


def test_a_size_that_the_model_or_the_ranks_do_not_allow_is_not_proposed(cfg, node):
    cfg.model.path = "Qwen/Qwen2.5-0.5B"  # 14 heads, two of keys
    allowed = [
        change
        for change in itertools.chain(*splits(cfg, node))
        if advice._Search(advice._changed(cfg, change), node).plan({}, traced=False) is not None
    ]
    assert allowed == [{"trainer.context_parallel_size": 2}, {"trainer.tensor_parallel_size": 2}]


def test_large_engines_get_more_gpus_and_no_more_than_the_cluster_has():
    for name in ("engines", "one engine", "too few GPUs"):
        cfg, cluster = config_and_cluster(name)
        changes = find_changes(cfg, cluster)
        assert changes is not None and changes["rollout.tensor_parallel_size"] > 1
        assert make_plan(with_changes(cfg, changes), cluster).gpus <= cluster.gpus


def test_ranks_and_engines_share_gpus_that_are_too_few(cfg, node):
    one = Cluster(1, 1, node.device)
    cfg.rollout.colocate, cfg.trainer.offload = False, "none"
    cfg.trainer.num_workers = cfg.rollout.num_engines = 1
    assert find_changes(cfg, one) == {"rollout.colocate": True}


def test_engines_that_work_ahead_keep_gpus_of_their_own(cfg, node):
    cfg.rollout.colocate, cfg.trainer.offload, cfg.rollout.ahead = False, "none", 1
    changes = find_changes(cfg, node)
    assert changes is not None and changes.keys() == {"trainer.num_workers", "rollout.num_engines"}
    cfg.trainer.num_workers = cfg.rollout.num_engines = 1
    assert find_changes(cfg, Cluster(1, 1, node.device)) is None
    assert larger_cluster(cfg, Cluster(1, 1, node.device)) == (Cluster(2, 1, node.device), {})


def test_what_no_change_makes_fit_needs_the_smallest_larger_cluster(cfg, node):
    cfg.model.path = "Qwen/Qwen3-32B"
    cfg.trainer.num_workers = cfg.rollout.num_engines = 1
    cfg.trainer.offload = "none"
    one = Cluster(1, 1, replace(node.device, host_memory=100 * 10**9))
    assert find_changes(cfg, one) is None
    larger = larger_cluster(cfg, one)
    assert larger is not None
    cluster, changes = larger
    assert fits(cfg, cluster, changes)
    assert find_changes(cfg, Cluster(cluster.nodes - 1, 1, one.device)) is None


def test_a_machine_without_gpus_gets_a_larger_cache(cfg, cpu):
    cfg.model.path, cfg.rollout.colocate, cfg.trainer.offload = None, False, "none"
    cfg.trainer.num_workers = cfg.rollout.num_engines = 1
    cfg.rollout.kv_cache_mb, cfg.rollout.max_response_tokens = 1, 2000
    changes = find_changes(cfg, cpu)
    assert changes is not None and changes.keys() == {"rollout.kv_cache_mb"}


@pytest.fixture
def traces(monkeypatch) -> list[tuple[Any, ...]]:
    """The arguments of each trace that the test makes. None is known before."""
    calls, trace = [], activations._trace

    def counted(*args: Any) -> activations.Activations:
        calls.append(args)
        return trace(*args)

    monkeypatch.setattr(activations, "_traces", {})
    monkeypatch.setattr(activations, "_trace", counted)
    return calls


@pytest.mark.parametrize("name", ["engines", "too few GPUs"])
def test_a_search_for_a_large_model_traces_it_a_few_times(traces, name):
    """A trace takes a tenth of a second, and nearly everything else of a search takes no time."""
    cfg, cluster = config_and_cluster(name)
    assert find_changes(cfg, cluster) is not None
    assert 0 < len(traces) <= MOST_TRACES


@pytest.mark.parametrize("words", [("2x8xH100", 16), ("8xA100-40GB", 8, "rollout.max_response_tokens=65536")])
def test_the_longest_searches_trace_a_few_times(traces, words):
    gpus, count, *others = words
    sizes = [f"trainer.num_workers={count}", f"rollout.num_engines={count}", "rollout.colocate=true"]
    cfg, cluster = compose([*LLAMA, "algorithm=ppo", *sizes, *others]), parse_cluster(gpus)
    assert find_changes(cfg, cluster) or larger_cluster(cfg, cluster)
    assert 0 < len(traces) <= MOST_TRACES_OF_LONGEST


def test_changes_obey_the_schema(cfg):
    assert with_changes(cfg, {"trainer.offload": "none"}).trainer.offload == "none" != cfg.trainer.offload
    with pytest.raises(UserError):
        with_changes(cfg, {"rollout.colocate": False})  # trainer.offload needs it
