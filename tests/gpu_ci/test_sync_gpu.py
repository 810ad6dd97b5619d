"""Weights on their way to an engine on the same GPU, and the process groups on the way."""

from __future__ import annotations

import dataclasses
import multiprocessing
import secrets
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.support.generation import ROLLOUT, SAMPLED, make_requests, with_sampling
from tests.support.ranks import run_ranks
from tests.support.roles import roles
from tests.support.training import config, make_batch, update
from tests.support.weights import BUCKET, assert_equal, make_weights
from tests.support.whole_batches import compute_batch
from trainer.config import FSDPConfig
from trainer.generation.transformers_engine import TransformersEngine
from trainer.generation.weight_sync import Broadcast, Ipc, SharedMemory, WeightTransferGroup
from trainer.parallel.batching import stack_padded
from trainer.workers.policy import PolicyWorker
from trainer.workers.rank import Rank


def broadcast_alone(rank: Rank, directory: str) -> None:
    channel = WeightTransferGroup(Broadcast(f"file://{directory}/store", 0, rank.device, 60.0, BUCKET), sender=True)
    for _ in range(2):  # names are announced once
        tensor = torch.arange(8.0, device=rank.device)
        channel.send(iter([("a", tensor), ("b", tensor.bfloat16()[::2])]))
        assert torch.equal(tensor, torch.arange(8.0, device=rank.device))


def test_a_group_for_weights_opens_and_sends(device, tmp_path):
    run_ranks(1, broadcast_alone, str(tmp_path), device=device)


def send_versions(source: Ipc, versions: tuple[int, ...]) -> None:
    for version in versions:
        source.send(iter(make_weights(version, source.device).items()), rank=0)
        if source.device == "cuda":  # not even the buffers stay, which an engine may need
            assert torch.cuda.memory_allocated() == 0


@pytest.mark.parametrize("settings", ["expandable_segments:True", "expandable_segments:False"])
def test_weights_go_from_process_to_process_on_one_gpu(device, monkeypatch, settings):
    """Both kinds of memory that a rank may have. The other process has imported no buffer before."""
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", settings)
    source, versions = Ipc(secrets.token_hex(16), (0,), device, 120.0, BUCKET), (1, 2, 3)
    rank = multiprocessing.get_context("spawn").Process(target=send_versions, args=(source, versions))
    rank.start()
    try:
        for version in versions:
            assert_equal(list(source.receive()), make_weights(version, device))
    finally:
        rank.join(60)
        rank.kill()
    assert rank.exitcode == 0


def reduce_on_both(rank: Rank) -> list[float]:
    sums = []
    for device in {"cpu", rank.device}:
        tensor = torch.ones(3, device=device)
        dist.all_reduce(tensor)
        sums.append(float(tensor.sum()))
    return sums


def test_tensors_of_host_and_gpu_share_one_process_group(device):
    assert set(run_ranks(1, reduce_on_both, device=device)[0]) == {3.0}


def take_turns(rank: Rank, path: str) -> None:
    rank.build(roles(rank.cfg, ["policy"]), path)
    worker = rank.roles["policy"]
    assert isinstance(worker, PolicyWorker)
    engine = TransformersEngine(
        path, dtype="float32", seed=1, rollout=dataclasses.replace(ROLLOUT, colocate=True), device=rank.device
    )
    requests = with_sampling(make_requests(8), dataclasses.replace(SAMPLED, temperature=1.0))
    for version in (1, 2):
        difference = disagreement(rank, requests, engine.generate(requests))
        assert difference < 1e-3, f"version {version} disagrees by {difference}"
        awake = torch.cuda.memory_allocated() if rank.device == "cuda" else 1
        engine.sleep()
        assert rank.device == "cpu" or torch.cuda.memory_allocated() < awake
        update(rank, "policy", make_batch(), version)
        directory = worker.open_shared("float32", 0)
        begin = time.perf_counter()
        worker.write_weights(directory, "float32")
        engine.sync_weights(SharedMemory(directory), version + 1)
        seconds = time.perf_counter() - begin
        print(f"sync: {worker.weight_bytes('float32') / seconds / 1e9:.2f} GB/s")
        worker.close_shared()
        engine.wake()
    assert {completion.weight_versions for completion in engine.generate(requests[:2])} == {(3, 3)}


def disagreement(rank: Rank, requests, completions) -> float:
    """The largest difference of a log-prob of the engine from that of the policy."""
    rows = [[*r.prompt_token_ids, *c.token_ids] for r, c in zip(requests, completions, strict=True)]
    lengths = np.asarray([len(row) for row in rows])
    prompts = np.asarray([len(r.prompt_token_ids) for r in requests])
    columns = np.arange(lengths.max())
    mask = ((columns >= prompts[:, None]) & (columns < lengths[:, None])).astype(np.float32)
    ids = stack_padded(rows, np.int64, lengths.max())
    batch = {"input_ids": ids, "mask": mask, "lengths": lengths, "group_ids": np.arange(len(rows))}
    order, found = compute_batch(rank, "policy", "logprobs", batch)
    logprobs = np.zeros_like(found)
    logprobs[order] = found
    return max(
        float(np.abs(logprobs[i, prompts[i] : lengths[i]] - np.asarray(c.logprobs)).max())
        for i, c in enumerate(completions)
    )


def test_rank_and_engine_take_turns_on_one_gpu(device, wide_path):
    cfg = config()
    cfg.rollout.temperature = 1.0
    cfg.trainer.policy.fsdp = FSDPConfig(param_dtype="float32")
    run_ranks(1, take_turns, wide_path, cfg=cfg, device=device)


def packed_and_alone(rank: Rank, path: str) -> tuple[float, float, float]:
    """How far log-probs depend on packing and on the shape of the micro-batch, and metrics on the run."""
    rank.build(roles(rank.cfg, ["policy"]), path)
    worker = rank.roles["policy"]
    assert isinstance(worker, PolicyWorker)
    batch, results = make_batch(), []
    for tokens in (16384, 1, 60):  # all rows packed, each alone, a few packed
        worker.max_tokens = tokens
        rows, values = compute_batch(rank, "policy", "logprobs", batch)
        ordered = np.zeros_like(values)
        ordered[rows] = values
        results.append(ordered)
    worker.max_tokens = 16384
    alone, few = (float(np.abs(results[0] - other).max()) for other in results[1:])
    state = {name: tensor.clone() for name, tensor in worker.module.state_dict().items()}
    norms = []
    for _ in range(2):
        worker.module.load_state_dict(state)
        norms.append(update(rank, "policy", batch, 1)["grad_norm"])
        worker.optimizers.all[0].state.clear()
    return alone, few, abs(norms[0] - norms[1]) / norms[0]


@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-3), ("bfloat16", 0.15)])
def test_log_probs_hardly_depend_on_packing(device, wide_path, dtype, tolerance):
    cfg = config(mini_batch_size=6)
    cfg.trainer.policy.fsdp = FSDPConfig(param_dtype=dtype)
    ((alone, few, between_runs),) = run_ranks(1, packed_and_alone, wide_path, cfg=cfg, device=device)
    print(f"{dtype}: packed or alone {alone:.2e}, two shapes {few:.2e}, two runs of a step {between_runs:.2e}")
    assert alone < tolerance and few < tolerance
    assert between_runs < 1e-2
