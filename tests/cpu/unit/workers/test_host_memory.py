"""Copies of tensors in host memory: one buffer a role, shared by saves and by what leaves the GPU."""

from __future__ import annotations

import pytest
import torch

from tests.support.ranks import run_ranks
from tests.support.roles import roles
from tests.support.training import config, make_batch, update
from trainer.checkpoint.sharded import ShardedFiles
from trainer.workers import host_memory
from trainer.workers.host_memory import HostBuffer, HostMemory, buffer_bytes, storages_of
from trainer.workers.rank import Rank


def test_a_copy_has_the_values_views_and_plain_values_of_a_state():
    base = torch.arange(12.0).view(3, 4)
    state = {
        "views": [base[1:], base.T],
        "empty": torch.empty(0, 5),
        "step": torch.tensor(7),
        "options": {"lr": 0.1, "betas": (0.9, 0.95), "name": None},
    }
    copy = HostMemory(None).copy(storages_of(state))
    expected = [base[1:].clone(), base.T.clone()]
    found = copy.state(state)
    base.zero_()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found["views"], expected, strict=True))
    assert found["views"][0].untyped_storage().data_ptr() == found["views"][1].untyped_storage().data_ptr()
    assert found["empty"].shape == (0, 5) and int(found["step"]) == 7
    assert found["options"] == state["options"]


def test_a_tensor_of_a_copy_is_alone_in_its_storage():
    """DCP would clone it otherwise before it writes it."""
    state = [torch.ones(5), torch.ones(7, dtype=torch.bfloat16)]
    found = HostMemory(None).copy(storages_of(state)).state(state)
    assert [tensor.untyped_storage().nbytes() for tensor in found] == [20, 14]


def test_one_buffer_serves_one_copy_after_another():
    memory, tensor = HostMemory(None), torch.ones(100)
    for _ in range(3):
        copy = memory.hold(memory.copy(storages_of(tensor)))  # a save writes it
        memory.forget()
        memory.release(copy)
    assert memory.size == buffer_bytes([400]) == 448


def test_a_copy_that_is_written_stays_as_it_is():
    memory, tensor = HostMemory(None), torch.ones(100)
    written = memory.hold(memory.copy(storages_of(tensor)))
    number = next(iter(storages_of(tensor)))
    memory.forget()
    tensor.fill_(2.0)
    memory.offload([tensor])
    assert written.parts[number].view(torch.float32).tolist() == [1.0] * 100
    assert memory.size == 2 * 448


def test_memory_is_taken_once_if_each_save_is_still_written_when_the_tensors_leave():
    """A save has a little more than what is offloaded. To pin memory takes many times as long as a copy."""
    memory, tensor, generator = HostMemory(None), torch.ones(100), torch.ones(1)
    buffers = []
    for _ in range(3):
        written = memory.hold(memory.copy(storages_of([tensor, generator])))
        memory.forget()  # the tensors change
        memory.offload([tensor])
        buffers.append({copy.buffer for copy in (written, memory.current)})
        memory.onload()
        memory.release(written)
    assert len(set.union(*buffers)) == 2


def test_a_larger_buffer_takes_the_place_of_a_smaller_one():
    memory = HostMemory(None)
    memory.copy(storages_of(torch.ones(100)))
    memory.copy(storages_of(torch.ones(200)))
    assert memory.size == buffer_bytes([800])


def test_a_buffer_that_the_machine_has_no_memory_for_is_refused(monkeypatch):
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 10**9)
    with pytest.raises(OSError, match=r"^2\.00 GB of host memory are needed .* 1\.00 GB are available"):
        HostBuffer(2 * 10**9, None)


def test_the_pages_say_how_much_host_memory_is_needed():
    with open("docs/clusters.md") as file:
        text = " ".join(file.read().split())
    policy, reference = 4_022_468_096, 4_022_468_096  # Qwen3-4B, its embeddings tied
    alone, both = (f"{size / 1e9:.0f} GB" for size in (12 * policy, 12 * policy + 2 * reference))
    assert f"For Qwen3-4B that is {alone}, and {both} with a reference and `trainer.offload=all`" in text


def save_and_offload(rank: Rank, path: str, directory: str) -> tuple[list[int], int, int, float, float]:
    """Sizes of the memory for copies after each step, what a save needs, the parameters, and two numbers to compare."""
    rank.build(roles(rank.cfg, ["policy"]), path)
    sizes, memory = [], rank.saver.memory("policy")
    for step in (1, 2, 3):
        update(rank, "policy", make_batch(), step)
        rank.release_memory()
        rank.begin_save(["policy"], ShardedFiles(f"{directory}/{step}"))
        rank.release_memory()
        rank.finish_save()
        sizes.append(memory.size)
    before = update(rank, "policy", make_batch(), 4)["grad_norm"]
    worker = rank.roles["policy"]
    needed = buffer_bytes(storage.nbytes() for storage in storages_of(worker.state()).values())
    parameters = worker.num_parameters()[0]
    rank.call("policy", "load", ShardedFiles(f"{directory}/3"))
    return sizes, needed, parameters, before, update(rank, "policy", make_batch(), 4)["grad_norm"]


def test_offload_and_saves_share_one_buffer(model_path, tmp_path):
    ((sizes, needed, parameters, before, again),) = run_ranks(
        1, save_and_offload, model_path, str(tmp_path), cfg=config(offload="all")
    )
    assert sizes == [sizes[0]] * 3 and 12 * parameters <= sizes[0] <= needed
    assert needed - 12 * parameters < 50_000  # small tensors, and rounding
    assert before == again
