"""What a rank on a GPU leaves for people to look at: profiles, and the memory of a GPU that has run out of it."""

from __future__ import annotations

import gzip
import json
import pickle
from typing import Any

import pytest
import torch

from tests.support.ranks import run_ranks
from tests.support.roles import roles
from tests.support.training import config, make_batch, update
from trainer.parallel.profiling import snapshot_path
from trainer.workers.rank import Rank


def profile_an_update(rank: Rank, path: str, directory: str) -> None:
    rank.build(roles(rank.cfg, ["policy"]), path)
    rank.start_profile(directory, "rank")
    update(rank, "policy", make_batch(), 1)
    rank.stop_profile()


def test_a_profile_has_the_kernels_and_the_allocations(device, tiny_path, tmp_path):
    run_ranks(1, profile_an_update, tiny_path, str(tmp_path), cfg=config(), device=device)
    with gzip.open(tmp_path / "rank_0.json.gz") as file:
        kinds = {event.get("cat") for event in json.load(file)["traceEvents"]}
    assert "cpu_op" in kinds
    if device == "cuda":
        assert {"kernel", "gpu_memcpy"} <= kinds
        with open(tmp_path / "rank_0.memory.pickle", "rb") as file:
            memory = pickle.load(file)
        assert memory["segments"] and any(event["action"] == "alloc" for event in memory["device_traces"][0])


def run_out_of_memory(rank: Rank, path: str) -> tuple[str, str]:
    """Leave the rank no memory beside what it has; returns the file of the snapshot, and the error of its update."""
    rank.build(roles(rank.cfg, ["policy"]), path)
    update(rank, "policy", make_batch(), 1)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
    hog: Any = []
    with pytest.raises(torch.OutOfMemoryError):
        while True:
            hog.append(torch.empty(2**20, dtype=torch.uint8, device="cuda"))
    with pytest.raises(torch.OutOfMemoryError) as failed:
        rank.update("policy", make_batch(), 2)
    return snapshot_path(rank.cfg.trainer.run_dir, "policy_rank_0"), str(failed.value)


def test_a_gpu_that_runs_out_of_memory_leaves_what_is_in_it(device, wide_path, tmp_path):
    if device != "cuda":
        pytest.skip("only a GPU runs out of memory of its own")
    cfg = config()
    cfg.trainer.run_dir = str(tmp_path)
    ((path, message),) = run_ranks(1, run_out_of_memory, wide_path, cfg=cfg, device=device)
    assert path in message and "Tried to allocate" in message
    with open(path, "rb") as file:
        segments = pickle.load(file)["segments"]
    frames = [frame for s in segments for block in s["blocks"] for frame in block.get("frames", ())]
    assert any("test_profiling_gpu" in frame["filename"] for frame in frames)  # who has taken the memory
