"""The host memory of saves: taken before the first one, and never instead of it."""

from __future__ import annotations

import numpy as np

from tests.support.ranks import run_ranks
from tests.support.roles import roles
from tests.support.training import config, make_batch, update
from trainer.checkpoint.sharded import ShardedFiles
from trainer.models.tiny import TinyShape, build_tiny
from trainer.workers.rank import Rank


def reserve_and_save(rank: Rank, path: str, directory: str) -> tuple[np.ndarray, int, int]:
    """Log-probs under the saved weights, a step after memory was reserved; its size then, and after two saves."""
    rank.build(roles(rank.cfg, ["policy"]), path)
    update(rank, "policy", make_batch(), 1)
    rank.saver.reserve({"policy": rank.roles["policy"].state()})
    update(rank, "policy", make_batch(), 2)
    rank.saver._reserving.join()
    reserved = rank.saver.memory("policy").size
    for number in (1, 2):
        rank.begin_save(["policy"], ShardedFiles(f"{directory}/{number}"))
        rank.finish_save()
    return rank.score("policy", "logprobs", make_batch())[1], reserved, rank.saver.memory("policy").size


def load(rank: Rank, path: str, directory: str) -> np.ndarray:
    rank.build(roles(rank.cfg, ["policy"]), path)
    rank.call("policy", "load", ShardedFiles(directory))
    return rank.score("policy", "logprobs", make_batch())[1]


def test_saves_use_the_reserved_memory_and_hold_the_state_of_their_own_time(tmp_path):
    path, directory = str(tmp_path / "model"), str(tmp_path / "saved")
    build_tiny(TinyShape(hidden_size=32, intermediate_size=64, num_layers=2, seed=3), path)
    logprobs, reserved, after = run_ranks(1, reserve_and_save, path, directory, cfg=config())[0]
    assert after == reserved > 0
    for number in (1, 2):
        assert np.array_equal(run_ranks(1, load, path, f"{directory}/{number}", cfg=config())[0], logprobs)
