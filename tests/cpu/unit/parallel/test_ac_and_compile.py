"""What is done to the blocks of a model changes memory and time, and not the results."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.memory import allocator_peak
from tests.support.compiled import without_kernels
from tests.support.fsdp import in_order, prefetches
from tests.support.ranks import run_ranks
from tests.support.roles import roles
from tests.support.tables import table
from tests.support.training import GROUPS, config, make_batch, update
from tests.support.whole_batches import compute_batch
from trainer.config import FSDPConfig
from trainer.models.tiny import TinyShape, build_tiny
from trainer.parallel import shard
from trainer.parallel.ac_and_compile import compiles_blocks
from trainer.parallel.batching import select
from trainer.workers.rank import Rank


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("model"))
    build_tiny(TinyShape(hidden_size=64, intermediate_size=128, num_layers=4, seed=3), path)
    return path


def train_a_step(rank: Rank, path: str) -> dict[str, Any]:
    """Train a step of the policy; return metrics, weights, and the peak memory of the next update."""
    rank.build(roles(rank.cfg, ["policy"]), path)
    metrics = update(rank, "policy", make_batch(), 1)
    weights = [parameter.full_tensor() for parameter in rank.roles["policy"].module.parameters()]
    peak = allocator_peak(lambda: update(rank, "policy", make_batch(), 2))
    return {"metrics": metrics, "weights": weights, "peak": peak}


def results_of(path: str, **fsdp: Any) -> dict[str, Any]:
    cfg = config(mini_batch_size=GROUPS)
    cfg.trainer.policy.fsdp = FSDPConfig(**fsdp)
    return run_ranks(1, train_a_step, path, cfg=cfg)[0]


def test_recomputed_activations_take_less_memory_and_give_the_same_bits(model_path):
    modes = {mode: results_of(model_path, activation_checkpointing=mode) for mode in ("none", "selective", "full")}
    for result in modes.values():
        assert result["metrics"] == modes["none"]["metrics"]
        assert all(map(torch.equal, result["weights"], modes["none"]["weights"]))
    peaks = {mode: result["peak"] for mode, result in modes.items()}
    assert peaks["selective"] < 0.75 * peaks["none"] and peaks["full"] < 0.9 * peaks["selective"], peaks


def compile_and_train(rank: Rank, path: str) -> dict[str, Any]:
    """An update, and the log-probs before and after; the number of graphs, and the names of the weights.

    Another forward pass shows which blocks are gathered ahead.
    """
    shard.prefetch_depth = lambda *_: 1
    with pytest.MonkeyPatch.context() as patch:
        without_kernels(patch)
        return _compile_and_train(rank, path)


def _compile_and_train(rank: Rank, path: str) -> dict[str, Any]:
    rank.build(roles(rank.cfg, ["policy"]), path)
    before = compute_batch(rank, "policy", "logprobs", make_batch())[1]
    metrics = update(rank, "policy", make_batch(), 1)
    after = compute_batch(rank, "policy", "logprobs", make_batch())[1]
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    forward, _ = prefetches(lambda: compute_batch(rank, "policy", "logprobs", select(make_batch(), [0])))
    names = list(rank.roles["policy"].state()["model"])
    return {"metrics": metrics, "before": before, "after": after, "graphs": graphs, "names": names, "ahead": forward}


@pytest.mark.slow
def test_compiled_blocks_agree_and_are_compiled_once(tmp_path):
    """One graph with gradients and one without, for all blocks and all micro-batches. The softmax is compiled, too."""
    path = str(tmp_path)
    build_tiny(TinyShape(hidden_size=32, intermediate_size=64, num_layers=2, seed=3), path)
    cfg = config(max_tokens_per_micro_batch=150, mini_batch_size=GROUPS)
    plain = run_ranks(1, compile_and_train, path, cfg=cfg)[0]
    cfg.trainer.policy.fsdp = FSDPConfig(compile=True, activation_checkpointing="selective")
    compiled = run_ranks(1, compile_and_train, path, cfg=cfg)[0]
    assert compiled["graphs"] == 2 + 2 + 1 and plain["graphs"] == 0  # blocks; sums with and without entropies; gradient
    assert compiled["names"] == plain["names"]
    assert compiled["ahead"] == in_order(["", "model.layers.0", "model.layers.1"], 1)
    assert compiled["metrics"] == pytest.approx(plain["metrics"], rel=1e-5, abs=1e-6)
    assert compiled["before"] == pytest.approx(plain["before"], abs=1e-5)
    assert compiled["after"] == pytest.approx(plain["after"], abs=1e-3)  # Adam enlarges rounding of small gradients


@table(
    "setting, device, context, tensor, expected",
    [
        (None, "cuda", 1, 1, True),
        (None, "cuda", 2, 1, False),
        (None, "cuda", 1, 2, False),
        (None, "cpu", 1, 1, False),
        (True, "cpu", 1, 1, True),
        (False, "cuda", 1, 1, False),
    ],
)
def test_blocks_are_compiled_on_cuda_unless_ranks_share_a_micro_batch(setting, device, context, tensor, expected):
    sizes = {"dp_replicate": 1, "dp_shard": 2, "cp": context, "tp": tensor}
    assert compiles_blocks(FSDPConfig(compile=setting), device, sizes, deterministic=False) is expected
    assert compiles_blocks(FSDPConfig(compile=setting), device, sizes, deterministic=True) is bool(setting)
