"""What a rank on a GPU leaves for people to look at: profiles, and the memory of a GPU that has run out of it."""

from __future__ import annotations

import gzip
import json
import pickle

from tests.support.ranks import run_ranks
from tests.support.roles import roles
from tests.support.training import config, make_batch, update
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
