"""Checkpoints that are copied while the GPU computes, random states, and a kill in the middle of a save."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from tests.support.ranks import local_cluster, run_ranks, start_ranks
from tests.support.roles import roles
from tests.support.training import config, load_then_step, make_batch, save_then_step, update
from tests.support.whole_batches import compute_batch
from trainer.checkpoint.sharded import ShardedFiles
from trainer.config import Config, FSDPConfig
from trainer.workers.policy import PolicyWorker
from trainer.workers.rank import Rank


def in_float32(cfg: Config, **fsdp: Any) -> Config:
    cfg.trainer.policy.fsdp = FSDPConfig(param_dtype="float32", **fsdp)
    return cfg


def weights(worker: PolicyWorker) -> dict[str, Tensor]:
    """A copy of this rank's shards, on their device. The copy waits for nothing but the kernels before it."""
    shards = get_model_state_dict(worker.module)
    return {name: shard.to_local().detach().clone() for name, shard in shards.items()}


def keep_busy(device: str) -> None:
    """Queue kernels for about a second."""
    if device == "cuda":
        torch.cuda._sleep(2_000_000_000)


def step_behind_kernels(worker: PolicyWorker) -> None:
    """Queue a step of the optimizer, with random gradients, behind a busy kernel, and do not wait for it."""
    keep_busy(worker.device)
    for parameter in worker.module.parameters():
        parameter.grad = torch.randn_like(parameter)
    worker.optimizers.step()
    worker.optimizers.zero_grad()


def save_twice_under_load(rank: Rank, path: str, directory: str) -> None:
    rank.build(roles(rank.cfg, ["policy"]), path)
    worker = rank.roles["policy"]
    assert isinstance(worker, PolicyWorker)
    batch = make_batch()
    update(rank, "policy", batch, 1)
    for number in (1, 2):  # the second save writes into the pinned memory of the first
        step_behind_kernels(worker)
        expected = weights(worker)
        files = ShardedFiles(f"{directory}/{number}")
        rank.begin_save(["policy"], files)
        compute_batch(rank, "policy", "logprobs", batch)
        update(rank, "policy", batch, 2)
        rank.finish_save()
        after = weights(worker)
        assert any(not torch.equal(after[name], expected[name]) for name in expected)
        rank.call("policy", "load", files)
        restored = weights(worker)
        for name, tensor in expected.items():
            assert torch.equal(restored[name], tensor), name


@pytest.mark.parametrize(
    "fsdp", [{}, {"cpu_offload": True}, {"param_dtype": "bfloat16"}], ids=["plain", "offload", "bfloat16"]
)
def test_a_save_has_the_state_of_its_moment_while_kernels_run(device, wide_path, tmp_path, fsdp):
    cfg = config()
    cfg.trainer.policy.fsdp = FSDPConfig(**{"param_dtype": "float32", **fsdp})
    run_ranks(1, save_twice_under_load, wide_path, str(tmp_path), cfg=cfg, device=device)


def states(worker: PolicyWorker) -> list[Tensor]:
    """A copy of this rank's shards and of its optimizer's states, on their device."""
    moments = [state.to_local().clone() for state in worker.optimizers.tensors(worker.device)]
    return [*weights(worker).values(), *moments]


def leave_and_save_under_load(rank: Rank, path: str, directory: str) -> None:
    """Leave the GPU, be saved, return in part and as a whole, each while kernels are queued."""
    rank.build(roles(rank.cfg, ["policy"]), path)
    worker = rank.roles["policy"]
    assert isinstance(worker, PolicyWorker)
    batch = make_batch()
    update(rank, "policy", batch, 1)
    for number in (1, 2):  # all copies use one pinned buffer
        worker.before_weights_change()
        step_behind_kernels(worker)
        expected = states(worker)
        rank.release_memory()
        files = ShardedFiles(f"{directory}/{number}")
        keep_busy(rank.device)
        rank.begin_save(["policy"], files)
        keep_busy(rank.device)
        rank.release_memory()
        if rank.device == "cuda":
            torch.full((2**26,), float("nan"), device="cuda")  # others use the memory
        compute_batch(rank, "policy", "logprobs", batch)
        rank.finish_save()
        if rank.device == "cuda":
            assert all(map(torch.equal, states(worker), expected))
        update(rank, "policy", batch, 2)
        rank.call("policy", "load", files)
        assert all(map(torch.equal, states(worker), expected))


def test_states_that_leave_the_gpu_while_kernels_run_are_complete(device, wide_path, tmp_path):
    cfg = in_float32(config(offload="all"))
    run_ranks(1, leave_and_save_under_load, wide_path, str(tmp_path), cfg=cfg, device=device)


def draw_after_load(rank: Rank, path: str, directory: str) -> None:
    rank.build(roles(rank.cfg, ["policy"]), path)
    files = ShardedFiles(directory)
    rank.begin_save(["policy"], files)
    rank.finish_save()
    drawn = torch.rand(8, device=rank.device), torch.rand(8)
    rank.call("policy", "load", files, ("rng",))
    again = torch.rand(8, device=rank.device), torch.rand(8)
    assert all(torch.equal(a, b) for a, b in zip(drawn, again, strict=True))


def test_random_states_of_the_gpu_are_restored(device, tiny_path, tmp_path):
    run_ranks(1, draw_after_load, tiny_path, str(tmp_path), cfg=config(), device=device)


@pytest.mark.parametrize("direction", ["from the cpu", "to the cpu"])
def test_a_checkpoint_moves_between_cpu_and_gpu(device, tiny_path, tmp_path, direction):
    first, second = ("cpu", device) if direction == "from the cpu" else (device, "cpu")
    cfg = in_float32(config())
    expected = run_ranks(1, save_then_step, tiny_path, str(tmp_path), cfg=cfg, device=first)[0]
    found = run_ranks(1, load_then_step, tiny_path, str(tmp_path), cfg=cfg, device=second)[0]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)


def begin_second_save(rank: Rank, path: str, directory: str) -> None:
    load_then_step(rank, path, f"{directory}/1")
    rank.begin_save(["policy", "critic"], ShardedFiles(f"{directory}/2"))
    rank.finish_save()


@pytest.mark.parametrize("place", ["save:staging", "save:shards_written"])
def test_a_kill_in_a_save_leaves_the_checkpoint_before(device, tiny_path, tmp_path, place):
    cfg, reached = in_float32(config()), tmp_path / "reached"
    (expected,) = run_ranks(1, save_then_step, tiny_path, f"{tmp_path}/1", cfg=cfg, device=device)
    with local_cluster(1, cfg, device) as cluster:
        group = start_ranks(cluster, {"TRAINER_FAILPOINT": f"{place},1,{reached}"})
        group.start("run", cluster.rendezvous_address(group), begin_second_save, (tiny_path, str(tmp_path)))
        wait_for(reached)
        cluster.release(group)  # and its GPU is free for the next
        assert not os.path.exists(tmp_path / "2" / "policy" / "fsdp_config.json")
        group = start_ranks(cluster)
        (found,) = group.call("run", cluster.rendezvous_address(group), load_then_step, (tiny_path, f"{tmp_path}/1"))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)


def wait_for(file: Path) -> None:
    end = time.monotonic() + 120
    while not file.exists():
        assert time.monotonic() < end, f"{file} was not made in time"
        time.sleep(0.05)
