"""Batches of a step, and a rank in this process, for benchmarks of the workers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from benchmarks.memory import allocator_peak, peak_resident_bytes, reset_peak, resident_bytes
from tests.support.whole_batches import compute_batch, update_batch
from trainer.config import Config, RolloutConfig, policy_role
from trainer.parallel.batching import Batch
from trainer.parallel.mesh import destroy_process_group
from trainer.workers.host_memory import storages_of
from trainer.workers.rank import Rank


def gsm8k_lengths(rows: int, completion: int = 64, seed: int = 0) -> np.ndarray:
    """Return lengths like those of GSM8K prompts of about 77 tokens, in groups of 8, each with its completion."""
    prompts = np.random.default_rng(seed).lognormal(4.26, 0.38, -(-rows // 8))
    return np.clip(prompts, 20, 250).astype(int).repeat(8)[:rows] + completion


def make_batch(lengths: np.ndarray, vocabulary: int, completion: int = 64, group: int = 8) -> Batch:
    """Return rows of random tokens with these lengths; the last `completion` tokens of each are learnt.

    Each `group` rows are a group. Where these have the same length, they begin alike.
    """
    rng = np.random.default_rng(0)
    shape = len(lengths), int(lengths.max())
    columns = np.arange(shape[1])
    sampled = (columns >= lengths[:, None] - completion) & (columns < lengths[:, None]) & (columns > 0)
    mask = sampled.astype(np.float32)
    ids = rng.integers(5, vocabulary, shape)
    for first in range(0, len(lengths), group):
        if np.ptp(lengths[first : first + group]) == 0:
            ids[first : first + group, : lengths[first] - completion] = ids[first, : lengths[first] - completion]
    return {
        "input_ids": ids,
        "mask": mask,
        "lengths": np.asarray(lengths),
        "group_ids": np.arange(len(lengths)) // group,
        "advantages": rng.normal(size=shape).astype(np.float32) * mask,
        "old_logprobs": -9 * mask,
        "rollout_logprobs": -9 * mask,
    }


@contextmanager
def one_policy(path: str, directory: str, dtype: str, **trainer: Any) -> Iterator[Rank]:
    """One rank with the policy, in this process, which computes with one thread. `trainer`: settings of that section.

    Rows share no tokens, so that the FLOPs of a row are known.
    """
    cfg = Config(rollout=RolloutConfig(max_logprob_diff=None))  # the log-probs of the batch are made up
    cfg.model.path = path
    cfg.trainer.mini_batch_size = 10_000  # one optimizer step an update
    cfg.trainer.policy.fsdp.param_dtype = dtype
    for name, value in trainer.items():
        setattr(cfg.trainer, name, value)
    rank = Rank(cfg, 0, 1, "cpu")
    store = os.path.join(directory, f"store-{time.monotonic_ns()}")
    rank.connect(f"file://{store}")
    try:
        rank.build([policy_role(rank.cfg)], path)
        rank.roles["policy"].shares_prompts = False
        yield rank
    finally:
        rank.roles.clear()
        destroy_process_group()


class TimedRank:
    """Hosts a rank, which measures its own updates. It is here because ranks cannot import the main module."""

    def __init__(self, cfg: Config, rank: int, world_size: int, device: str):
        self._rank = Rank(cfg, rank, world_size, device)

    def run(self, address: str, path: str, batch: Any) -> tuple[float, float]:
        """Return the seconds on the clock and the CPU seconds of an update."""
        self._rank.connect(address)
        self._rank.build([policy_role(self._rank.cfg)], path)
        update_batch(self._rank, "policy", batch, 1)
        begin, cpu = time.perf_counter(), time.process_time()
        for step in (2, 3):
            update_batch(self._rank, "policy", batch, step)
        return (time.perf_counter() - begin) / 2, (time.process_time() - cpu) / 2


class PlannedRank:
    """Hosts a rank, which measures its memory and its time, for comparison with a plan."""

    def __init__(self, cfg: Config, rank: int, world_size: int, device: str):
        self._rank = Rank(cfg, rank, world_size, device)

    def run(self, address: str, path: str, batch: Any) -> dict[str, float]:
        """Return the peak bytes and the CPU seconds of the scores and the updates of all roles in a step.

        The seconds are the smallest of three steps.
        """
        rank = self._rank
        rank.connect(address)
        roles = rank.cfg.roles
        empty = resident_bytes()
        rank.build(roles, path)
        scored = {key: batch[key] for key in ("input_ids", "mask", "lengths", "group_ids")}

        def score() -> None:
            for role in roles:
                if role.computes:
                    compute_batch(rank, role.name, "values" if role.computes == "values" else "logprobs", scored)

        def update() -> None:
            for role in reversed(roles):
                if role.trained:
                    update_batch(rank, role.name, batch, 1)

        score()
        update()  # the states of the optimizer are there now
        states = sum(storage.nbytes() for worker in rank.roles.values() for storage in _storages(worker))
        allocator = states + max(allocator_peak(score), allocator_peak(update))
        reset_peak()
        times = [min(cpu_seconds_once(phase) for _ in range(3)) for phase in (score, update)]
        return {
            "allocator": allocator,
            "resident": peak_resident_bytes() - empty,
            "scores": times[0],
            "update": times[1],
        }


def _storages(worker: Any) -> list[Any]:
    tensors = list(worker.module.parameters())
    if hasattr(worker, "optimizer"):
        tensors += [value for state in worker.optimizers.all[0].state.values() for value in state.values()]
    return list(storages_of([tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]).values())


def cpu_seconds_once(function: Callable[[], Any]) -> float:
    """Return the CPU time of `function`."""
    begin = time.process_time()
    function()
    return time.process_time() - begin


def cpu_seconds(function: Callable[[], Any], repeat: int = 2) -> float:
    """Return the smallest CPU time of `function`, after one run that is not counted.

    With one thread it is the time on an idle machine; on a busy one it is much steadier than the time on the clock.
    """
    function()
    times = []
    for _ in range(repeat):
        begin = time.process_time()
        function()
        times.append(time.process_time() - begin)
    return min(times)


def matmul_flops(dtype: str, size: int = 2048) -> float:
    """Return the FLOP/s of products of square matrices on one thread."""
    a = torch.randn(size, size, dtype=getattr(torch, dtype))
    return 2 * size**3 / cpu_seconds(lambda: a @ a, repeat=5)
