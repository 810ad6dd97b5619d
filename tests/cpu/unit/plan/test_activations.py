"""Activations traced on fake tensors."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from benchmarks.memory import allocator_peak
from trainer.config import Config, TinyConfig, policy_role
from trainer.config.axes import AXES
from trainer.models.chunked_logprobs import Head, Targets, _ChunkedScores
from trainer.models.tiny import tiny_config
from trainer.plan.activations import Row, head_bytes, trace

ALONE = dict.fromkeys(AXES, 1)
ROW = Row((256, 256, 256, 256), None, 768)
SHARED = Row((256,) * 4, (0, 64, 64, 64), 768)


def config(**tiny) -> Config:
    cfg = Config()
    cfg.model.tiny = TinyConfig(hidden_size=128, intermediate_size=384, **{"num_layers": 6, **tiny})
    return cfg


def traced(cfg: Config, row: Row = ROW, device: str = "cpu", **sizes: int):
    """Return the activations of both kinds of passes."""
    arguments = cfg, policy_role(cfg), tiny_config(cfg.model.tiny), {**ALONE, **sizes}, row, device
    scores, update = trace(*arguments, backward=False), trace(*arguments, backward=True)
    return dataclasses.replace(update, forward=scores.forward, moved_forward=scores.moved_forward)


def with_mode(mode: str, **tiny) -> Config:
    cfg = config(**tiny)
    cfg.trainer.policy.fsdp.activation_checkpointing = mode
    return cfg


def test_every_block_saves_as_much():
    saved = [traced(config(num_layers=layers)).saved for layers in (2, 4, 8)]
    assert (saved[2] - saved[1]) == pytest.approx(2 * (saved[1] - saved[0]), rel=1e-6)
    assert saved[0] > 0


def test_recomputed_activations_are_not_saved():
    none, selective, full = (traced(with_mode(mode)) for mode in ("none", "selective", "full"))
    assert selective.saved < 0.75 * none.saved and full.saved < 0.4 * selective.saved
    assert full.peak < selective.peak < none.peak
    assert none.forward == full.forward < none.saved


def test_ranks_along_tp_and_cp_save_less():
    alone = traced(config())
    assert 0.45 < traced(config(), cp=2).saved / alone.saved < 0.6
    assert 0.4 < traced(config(), tp=2).saved / alone.saved < 0.85  # the residual stream is on all ranks


def test_shared_prompts_add_keys_and_values():
    assert traced(config(), SHARED).saved < traced(config()).saved


@pytest.mark.parametrize("row", [ROW, SHARED])
@pytest.mark.parametrize("sizes", [{}, {"cp": 2}, {"tp": 2}])
def test_the_kernel_of_gpus_is_traced_without_one(row, sizes):
    cfg = config()
    cfg.trainer.policy.fsdp.param_dtype = "bfloat16"
    on_gpu, on_cpu = traced(cfg, row, "cuda", **sizes), traced(cfg, row, "cpu", **sizes)
    assert 0 < on_gpu.saved <= on_cpu.saved * 1.1
    cfg.trainer.policy.fsdp.param_dtype = "float32"
    assert traced(cfg, row, "cuda", **sizes).saved > 1.5 * on_gpu.saved


def test_a_frozen_model_saves_nothing():
    cfg = config()
    frozen = dataclasses.replace(policy_role(cfg), trained=False)
    found = trace(cfg, frozen, tiny_config(cfg.model.tiny), ALONE, ROW, "cpu", backward=False)
    assert (found.saved, found.peak) == (0, 0) and found.forward > 0


@pytest.mark.parametrize("rows", [1024, 20_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_output_layer_takes_what_is_computed(rows, dtype):
    targets, width = 700, 64
    weight = torch.randn(rows, width, dtype=dtype, requires_grad=True)
    hidden = torch.randn(targets, width, dtype=dtype, requires_grad=True)
    wanted = Targets(torch.arange(targets), torch.zeros(targets, dtype=torch.long), 1.0, None)

    def work() -> None:
        scores, _ = _ChunkedScores.apply(hidden, weight, wanted.ids, Head(), 1.0, None)
        torch.autograd.grad(scores.sum(), (hidden, weight))

    row = Row((targets + 1,), None, targets)
    _, planned = head_bytes(rows, width, row, dtype.itemsize, "cpu", True)
    assert allocator_peak(work) == pytest.approx(planned, rel=0.15)


def test_a_value_head_takes_next_to_nothing():
    assert head_bytes(0, 64, ROW, 4, "cpu", True) == (0, 0)
