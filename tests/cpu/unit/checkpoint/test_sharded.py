"""Shards on disk."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.support.checkpoints import manager, save
from tests.support.namespaces import small_disk
from tests.support.opened import opened_files
from tests.support.ranks import run_ranks
from trainer.checkpoint import manifest as manifests
from trainer.checkpoint.components import Component
from trainer.checkpoint.sharded import ShardCheck, ShardedFiles
from trainer.checkpoint.storage import Storage
from trainer.errors import UserError
from trainer.workers.host_memory import local_tensor


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


def test_each_shard_is_checked_by_one_rank_and_a_changed_byte_in_it_is_found(tmp_path):
    path = save(manager(tmp_path), 1, [Component("policy", write_shards)])
    assert run_ranks(3, check_shards, path) == [[None, ["__0_0.distcp"]], [None, ["__1_0.distcp"]], [None, []]]
    shard = Path(path) / "policy/__1_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    manifests.verify(path, "unsharded")
    (problem, read) = run_ranks(1, check_shards, path)[0]
    assert "policy/__1_0.distcp does not have the content that was saved" in problem
    assert read == ["__0_0.distcp", "__1_0.distcp"]


def write_shards(staging: Storage):
    entries = [entry for part in run_ranks(2, write_odd_tensors, staging.root) for entry in part]
    return lambda: [manifests.FileEntry(**entry) for entry in entries]


def write_odd_tensors(rank, directory: str) -> list[dict]:
    return ShardedFiles(directory).write("policy", odd_tensors(), {"extra.json": "{}"}, dist.group.WORLD)


def odd_tensors(empty: bool = False) -> dict:
    """Tensors of all kinds, sharded over all ranks, and those of one rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    numbers = torch.arange(7 * 5.0).view(7, 5)
    whole = {"rows": numbers, "columns": numbers + 1, "narrow": numbers.bfloat16(), "none": torch.zeros(0, 3)}
    whole |= {"transposed": numbers.t().clone(memory_format=torch.preserve_format)}
    places = {name: Shard(1 if name == "columns" else 0) for name in whole}
    sharded = {name: distribute_tensor(value, mesh, [places[name]]) for name, value in whole.items()}
    plain = {"scalar": torch.tensor(3.0), "count": torch.tensor(4), "flags": torch.tensor([True, False])}
    state = {"tensors": {**sharded, **plain}, "values": {"list": [1, "a"], "number": 0.5}}
    if empty:
        state["tensors"] = {name: torch.zeros_like(value) for name, value in state["tensors"].items()}
        state["values"] = {"list": [], "number": 0.0}
    return state


def check_shards(rank, path: str) -> list:
    with opened_files() as names:
        problem, places = ShardCheck(manifests.read(path)).run()
    assert places == {}, "a disk needs no copy"
    return [problem and str(problem), [name for name in names if name.endswith(".distcp")]]


@pytest.mark.parametrize("count", [1, 3])
def test_any_number_of_ranks_reads_every_kind_of_tensor(tmp_path, count):
    path = save(manager(tmp_path), 1, [Component("policy", write_shards)])
    assert run_ranks(count, read_odd_tensors, path) == [None] * count


def read_odd_tensors(rank, path: str) -> None:
    state, expected = odd_tensors(empty=True), odd_tensors()
    state["tensors"]["scalar"] = torch.zeros((), dtype=torch.float64)  # converted
    places = {name: local_tensor(value).data_ptr() for name, value in state["tensors"].items()}
    ShardedFiles(path).read("policy", state)
    for name, value in expected["tensors"].items():
        found = local_tensor(state["tensors"][name])
        assert torch.equal(found, local_tensor(value).to(found.dtype)), name
        assert found.data_ptr() == places[name], "filled in place"
    assert state["values"] == expected["values"]


def test_a_rank_that_cannot_read_its_part_fails_all(tmp_path):
    path = save(manager(tmp_path), 1, [Component("policy", write_shards)])
    os.truncate(f"{path}/policy/__1_0.distcp", 100)
    problems = run_ranks(2, read_truncated, path)
    assert problems[0] == problems[1] and "cannot be loaded" in problems[0]


def read_truncated(rank, path: str) -> str:
    with pytest.raises(UserError) as error:
        ShardedFiles(path).read("policy", odd_tensors(empty=True), dist.group.WORLD)
    return str(error.value)


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
