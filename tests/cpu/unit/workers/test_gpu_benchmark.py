"""The parts of `benchmarks.gpu` that need no GPU."""

from __future__ import annotations

import weakref
from types import SimpleNamespace

import torch

from benchmarks import gpu
from tests.support.roles import roles
from trainer.config import Config


class Hungry:
    """A worker whose passes need more memory than there is, unless activations are recomputed."""

    def __init__(self, recompute: str):
        self.recompute = recompute


class Rank:
    """As much of a rank as the benchmark needs to build its worker again."""

    def __init__(self) -> None:
        self.cfg, self.device = Config(), "cpu"
        self.roles: dict[str, Hungry] = {}
        self.earlier: list[weakref.ref] = []
        self.build(roles(self.cfg, ["policy"]), "")

    def build(self, roles: list[str], path: str) -> None:
        assert all(worker() is None for worker in self.earlier), "its memory is still held"
        worker = Hungry(self.cfg.trainer.policy.fsdp.activation_checkpointing)
        self.earlier.append(weakref.ref(worker))
        self.roles["policy"] = worker


def test_after_out_of_memory_the_worker_is_freed_before_another_is_built(monkeypatch, capsys):
    tried = []

    def passes(rank: Rank, name: str, micro_tokens: int, device: str, peak: float) -> None:
        worker = rank.roles["policy"]
        tried.append((micro_tokens, worker.recompute))
        if worker.recompute == "none" or micro_tokens > 4096:
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(gpu, "measure_passes", passes)
    gpu.measure_micro_batches(Rank(), "4B", "", SimpleNamespace(tokens=[4096, 16384], device="cpu"), 1.0)
    assert tried == [(4096, "none"), (4096, "full"), (16384, "full")]
    assert "left out | 16,384" in capsys.readouterr().out


def test_a_model_whose_states_do_not_fit_is_left_out():
    assert gpu.problem_of("4B", 85 * 10**9) is None
    assert gpu.problem_of("4B", 24 * 10**9) == "it needs 64 GB, and the GPU has 24 GB"
