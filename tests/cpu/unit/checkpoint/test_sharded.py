"""Shards on disk."""

from __future__ import annotations

import errno
import os

import pytest
import torch
import torch.distributed as dist

from tests.support.namespaces import small_disk
from tests.support.ranks import run_ranks
from trainer.checkpoint.sharded import ShardedFiles
from trainer.errors import UserError


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


def test_entries_that_an_earlier_save_does_not_have_can_be_optional(tmp_path):
    """As the state of the CUDA generator, when a run that began on CPUs continues on a GPU."""
    found, problem = run_ranks(1, read_more_than_was_written, str(tmp_path))[0]
    assert found == {"rng": ["torch"], "w": [1.0, 2.0]}
    assert "rng.cuda" in problem


def read_more_than_was_written(rank, directory: str) -> tuple[dict, str]:
    files, group = ShardedFiles(directory), dist.group.WORLD
    files.write("policy", {"w": torch.tensor([1.0, 2.0]), "rng": {"torch": torch.ones(3)}}, {}, group)
    state = {"w": torch.zeros(2), "rng": {"torch": torch.zeros(3), "cuda": torch.zeros(3)}}
    try:
        files.read("policy", state)
        problem = ""
    except UserError as error:
        problem = str(error)
    files.read("policy", state, optional=("rng.cuda",))
    return {"rng": list(state["rng"]), "w": state["w"].tolist()}, problem


def test_a_full_disk_is_named_with_the_size_of_the_save(tmp_path):
    with small_disk("4m") as disk:
        text = run_ranks(1, write_too_much, disk)[0]
    remedy = "delete what is not needed, or keep fewer checkpoints (trainer.max_ckpts_to_keep)"
    assert text == f"rank 0 could not write policy: the disk is full: 16.00 MB are needed; {remedy}"


def write_too_much(rank, directory: str) -> str:
    state = {"w": torch.zeros(10**6), "moments": [torch.zeros(10**6, dtype=torch.float64), torch.zeros(10**6)]}
    with pytest.raises(OSError) as error:
        ShardedFiles(directory).write("policy", state, {}, dist.group.WORLD)
    assert error.value.errno == errno.ENOSPC
    return error.value.strerror
