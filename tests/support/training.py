"""A step's experience, and what ranks do with it in tests of the workers, on the CPU and on GPUs."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tests.support.roles import roles
from tests.support.whole_batches import compute_batch, update_batch
from trainer.checkpoint.sharded import ShardedFiles
from trainer.config import Config
from trainer.errors import NonFiniteError
from trainer.parallel.batching import Batch
from trainer.parallel.collectives import AxisGroup
from trainer.workers.rank import Rank

GROUPS, PER_GROUP, WIDTH = 6, 4, 24


def update(rank: Rank, role: str, batch: Batch, step: int, kl_coef: float | None = None) -> dict[str, float]:
    """The metrics of all optimizer steps of `role` on `batch`."""
    return update_batch(rank, role, batch, step, None if kl_coef is None else {"kl_coef": kl_coef}).metrics


def make_batch() -> Batch:
    """Experience of `GROUPS` prompts of four tokens, with completions of very different length."""
    rng = np.random.default_rng(0)
    size = GROUPS * PER_GROUP
    lengths = rng.integers(6, WIDTH + 1, size)
    ids = rng.integers(0, 256, (size, WIDTH)).astype(np.int64)
    ids[:, :4] = ids[::PER_GROUP, :4].repeat(PER_GROUP, axis=0)
    mask = np.zeros((size, WIDTH), np.float32)
    for row, length in enumerate(lengths):
        mask[row, 4:length] = 1
        ids[row, length:] = 0
    noise = rng.normal(size=(3, size, WIDTH)).astype(np.float32)
    return {
        "input_ids": ids,
        "mask": mask,
        "lengths": lengths,
        "group_ids": np.repeat(np.arange(GROUPS), PER_GROUP),
        "advantages": noise[0] * mask,
        "returns": noise[1] * mask,
        "old_logprobs": (-5.7 + 0.3 * noise[2]) * mask,
        "rollout_logprobs": -5.7 * mask,
        "ref_logprobs": (-5.7 + 0.2 * noise[1]) * mask,
        "values": 0.1 * noise[0] * mask,
    }


def config(**trainer) -> Config:
    cfg = Config()
    cfg.algorithm.kl_coef = 0.1
    cfg.algorithm.entropy_coef = 0.01
    cfg.rollout.max_logprob_diff = None  # no engine has sampled the batch
    cfg.trainer.mini_batch_size = 3
    cfg.trainer.policy.optimizer.lr = 1e-3
    cfg.trainer.critic.optimizer.lr = 1e-3
    cfg.trainer = dataclasses.replace(cfg.trainer, **trainer)
    return cfg


def train_two_steps(rank: Rank, path: str, out: str | None = None, shares_prompts: bool = True) -> dict:
    """Two steps of policy and critic; returns their metrics and some values of the result."""
    rank.build(roles(rank.cfg, ["policy", "critic", "reference"]), path)
    for worker in rank.roles.values():
        worker.shares_prompts &= shares_prompts
    batch = make_batch()
    metrics = [update(rank, role, batch, step) for step in (1, 2) for role in ("critic", "policy")]
    if out:
        rank.call("policy", "write_weights", out, "float32")
    rows, logprobs = compute_batch(rank, "policy", "logprobs", batch)
    _, values = compute_batch(rank, "critic", "values", batch)
    return {"metrics": metrics, "rows": rows, "logprobs": logprobs, "values": values}


def train_on_axes_of_one_rank(rank: Rank, path: str) -> dict:
    """`train_two_steps` with the axes `tp` and `cp` of one rank each, which call all that longer axes call."""
    layout = rank.layout
    mesh = init_device_mesh(rank.device, (1, 1), mesh_dim_names=("dp_shard", "tp"))
    layout.fsdp_mesh, layout.tp_mesh, layout.cp = (
        mesh["dp_shard"],
        mesh["tp"],
        AxisGroup.along(mesh["tp"]),
    )
    return train_two_steps(rank, path)


def assembled(results: list[dict], name: str) -> np.ndarray:
    out = np.full((GROUPS * PER_GROUP, WIDTH), np.nan, np.float32)
    for result in results:
        out[result["rows"]] = result[name]
    assert not np.isnan(out).any()
    return out


def assert_close(ours: dict, theirs: dict) -> None:
    """Equal but for the order of float32 sums; a token at the edge of the clip range may fall on either side."""
    one_token = 2.0 / float(make_batch()["mask"].sum())
    assert ours.pop("clip_frac") == pytest.approx(theirs["clip_frac"], abs=2 * one_token)
    assert ours == pytest.approx({k: v for k, v in theirs.items() if k != "clip_frac"}, rel=1e-4, abs=2e-6)


def save_then_step(rank: Rank, path: str, directory: str) -> tuple[dict, dict]:
    rank.build(roles(rank.cfg, ["policy", "critic"]), path)
    batch = make_batch()
    for role in ("critic", "policy"):
        update(rank, role, batch, 1)
    rank.begin_save(["policy", "critic"], ShardedFiles(directory))
    torch.rand(3)
    results = update(rank, "critic", batch, 2), update(rank, "policy", batch, 2)  # while it is being written
    entries = rank.finish_save()
    assert sorted(e["path"] for e in entries if e["path"].endswith(".distcp")) == [
        f"{role}/__{rank.rank}_0.distcp" for role in ("critic", "policy")
    ]
    return results


def load_then_step(rank: Rank, path: str, directory: str) -> tuple[dict, dict]:
    rank.build(roles(rank.cfg, ["policy", "critic"]), path)
    for role in ("critic", "policy"):
        rank.call(role, "load", ShardedFiles(directory), ("weights", "optimizer", "rng"))
    batch = make_batch()
    return update(rank, "critic", batch, 2), update(rank, "policy", batch, 2)


def step_into_nan(rank: Rank, path: str) -> tuple[str, bool]:
    rank.build(roles(rank.cfg, ["policy"]), path)
    batch = make_batch()
    batch["advantages"][0, 5] = np.nan
    before = [p.full_tensor().clone() for p in rank.roles["policy"].module.parameters()]
    with pytest.raises(NonFiniteError) as error:
        update(rank, "policy", batch, 1)
    after = [p.full_tensor() for p in rank.roles["policy"].module.parameters()]
    return str(error.value), all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def stream_and_write(rank: Rank, path: str, out: str) -> dict[str, torch.Tensor]:
    rank.build(roles(rank.cfg, ["policy"]), path)
    rank.call("policy", "write_weights", out, "bfloat16")
    return {name: tensor.clone() for name, tensor in rank.roles["policy"].stream_weights("bfloat16")}


def first_step(rank: Rank, path: str) -> dict:
    rank.build(roles(rank.cfg, ["policy"]), path)
    return update(rank, "policy", make_batch(), 1)


def held_bytes(rank: Rank) -> int:
    """The bytes that weights and optimizer states take on the device of this rank."""
    trained = [rank.roles[role] for role in ("policy", "critic")]
    tensors = [
        tensor for worker in trained for tensor in (*worker.weight_tensors(), *worker.optimizers.tensors(worker.device))
    ]
    return sum(tensor.to_local().untyped_storage().nbytes() for tensor in tensors)


def train_with_offloading(rank: Rank, path: str, directory: str) -> dict:
    """Two steps and a save; before each, engines on the same GPU could have taken the memory."""
    rank.build(roles(rank.cfg, ["policy", "critic", "reference"]), path)
    rank.release_memory()
    batch = make_batch()
    metrics = [update(rank, role, batch, 1) for role in ("critic", "policy")]
    rank.release_memory()
    held = held_bytes(rank)
    rank.begin_save(["policy", "critic"], ShardedFiles(directory))
    rank.release_memory()  # it waits until the save has copied the states
    rank.finish_save()
    logprobs = compute_batch(rank, "policy", "logprobs", batch)[1]
    rank.release_memory()
    metrics += [update(rank, role, batch, 2) for role in ("critic", "policy")]
    return {"metrics": metrics, "logprobs": float(np.abs(logprobs).sum()), "held": held}


def left_after_scores(rank: Rank, path: str) -> tuple[list[str], int]:
    """What scores leave on the device when engines get the memory: gathered parameters, and bytes on a GPU."""
    rank.cfg.trainer.policy.fsdp.reshard_after_forward = False
    rank.build(roles(rank.cfg, ["policy", "reference"]), path)
    compute_batch(rank, "reference", "logprobs", make_batch())
    rank.release_memory()  # kernels have their workspaces now
    before = torch.cuda.memory_allocated() if rank.device == "cuda" else 0
    for role in ("policy", "reference"):
        compute_batch(rank, role, "logprobs", make_batch())
    rank.release_memory()
    grown = torch.cuda.memory_allocated() - before if rank.device == "cuda" else 0
    parameters = [
        (f"{role} {name}", parameter)
        for role, worker in rank.roles.items()
        for name, parameter in worker.module.named_parameters()
    ]
    return [name for name, parameter in parameters if not isinstance(parameter, DTensor)], grown
