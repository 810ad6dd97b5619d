"""`trainer.deterministic`: what reaches ranks and engines, and that all of our own code runs with it."""

from __future__ import annotations

import numpy as np
import torch

from tests.support.ranks import run_ranks
from tests.support.tables import table
from tests.support.training import config, train_two_steps
from trainer.cluster.resources import rank_environment
from trainer.config.engines import ENGINES
from trainer.models.tiny import TinyShape, build_tiny
from trainer.workers.rank import Rank


def train_and_look(rank: Rank, path: str) -> tuple[dict, bool, bool]:
    result = train_two_steps(rank, path)
    fills = torch.utils.deterministic.fill_uninitialized_memory
    return result, torch.are_deterministic_algorithms_enabled(), fills


def test_all_of_a_step_runs_with_deterministic_kernels_and_gives_the_same(tmp_path):
    """Policy, critic and reference, shared prompts, entropies and KL: an operator without such a kernel would raise."""
    build_tiny(TinyShape(hidden_size=32, intermediate_size=64, num_layers=2, seed=3), str(tmp_path))
    results = []
    for deterministic in (True, False):
        cfg = config(mini_batch_size=6, deterministic=deterministic)
        ((result, *found),) = run_ranks(1, train_and_look, str(tmp_path), cfg=cfg)
        assert found == ([True, False] if deterministic else [False, True])
        results.append(result)
    strict, plain = results
    assert strict["metrics"] == plain["metrics"]
    assert np.array_equal(strict["logprobs"], plain["logprobs"])


def test_ranks_on_gpus_get_what_cublas_and_the_compiler_need():
    assert rank_environment("cuda", {}, deterministic=True)["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert "CUBLAS_WORKSPACE_CONFIG" not in rank_environment("cuda", {})
    for device in ("cpu", "cuda"):
        assert rank_environment(device, {})["TORCHINDUCTOR_DETERMINISTIC"] == "1"


@table("engine", ENGINES)
@table("device", ["cpu", "cuda"])
@table("deterministic", [False, True])
def test_engines_get_what_they_need(engine, device, deterministic):
    found = ENGINES[engine].environment_on(device, deterministic)
    strict = deterministic and device == "cuda"
    assert found.get("CUBLAS_WORKSPACE_CONFIG") == (":4096:8" if strict else None)
    # vLLM on CPU crashes with it.
    assert found.get("VLLM_BATCH_INVARIANT") == ("1" if strict and engine == "vllm" else None)
    assert found["TORCHINDUCTOR_DETERMINISTIC"] == "1"
