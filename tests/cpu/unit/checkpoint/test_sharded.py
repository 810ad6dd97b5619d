"""Shards on disk."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from tests.support.ranks import run_ranks
from trainer.checkpoint.sharded import ShardedFiles


def test_shards_are_durable_before_they_are_named(tmp_path):
    names = run_ranks(1, write_shards_and_record, str(tmp_path))[0]
    assert {"__0_0.distcp", ".metadata", "extra.json", "policy"} <= set(names)
    assert names[-1] == "policy", "the directory comes last"


def write_shards_and_record(rank, directory: str) -> list[str]:
    synced: list[str] = []
    real = os.fsync

    def fsync(handle: int) -> None:
        real(handle)
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{handle}")))

    os.fsync = fsync
    try:
        ShardedFiles(directory).write("policy", {"w": torch.zeros(8)}, {"extra.json": "{}"}, dist.group.WORLD)
    finally:
        os.fsync = real
    return synced
