"""The host memory of saves: taken before the first one, and never instead of it."""

from __future__ import annotations

import numpy as np

from tests.support.ranks import run_ranks
from tests.support.training import config, make_batch, update
from trainer.checkpoint.sharded import ShardedFiles
from trainer.config import TinyConfig
from trainer.models.tiny import build_tiny
from trainer.workers.rank import Rank


def copies_of(rank: Rank) -> dict[int, int]:
    """The sizes of the copies in host memory that the stager keeps, by their addresses."""
    kept = rank.saver._stager._state_dict_stager._cached_storage_mapping.values()
    return {storage.data_ptr(): storage.nbytes() for storage in kept}


def reserve_and_save(rank: Rank, path: str, directory: str) -> tuple[np.ndarray, int, int]:
    """Log-probs under the saved weights, a step after memory was reserved; bytes of the copies then, and of more."""
    rank.build(["policy"], path)
    update(rank, "policy", make_batch(), 1)
    rank.saver.reserve({"policy": rank.roles["policy"].state()})
    update(rank, "policy", make_batch(), 2)
    reserved = copies_of(rank)
    rank.begin_save(["policy"], ShardedFiles(directory))
    rank.finish_save()
    more = sum(size for address, size in copies_of(rank).items() if address not in reserved)
    return rank.call("policy", "logprobs", make_batch())[1], sum(reserved.values()), more


def load(rank: Rank, path: str, directory: str) -> np.ndarray:
    rank.build(["policy"], path)
    rank.call("policy", "load", ShardedFiles(directory))
    return rank.call("policy", "logprobs", make_batch())[1]


def test_a_save_uses_the_reserved_memory_and_holds_the_state_of_its_own_time(tmp_path):
    path, directory = str(tmp_path / "model"), str(tmp_path / "saved")
    build_tiny(TinyConfig(hidden_size=32, intermediate_size=64, num_layers=2, seed=3), path)
    logprobs, reserved, more = run_ranks(1, reserve_and_save, path, directory, cfg=config())[0]
    assert more < 0.1 * reserved, "only the states of the generators are new"
    assert np.array_equal(run_ranks(1, load, path, directory, cfg=config())[0], logprobs)
