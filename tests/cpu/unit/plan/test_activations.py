"""Activations traced on fake tensors."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM

from benchmarks.memory import allocator_peak
from tests.support.compiled import without_kernels
from trainer.config import Config, FSDPConfig, policy_role
from trainer.models import logprobs
from trainer.models.attention import packing_arguments, set_attention
from trainer.models.logprobs import Head, Targets, _ChunkedScores
from trainer.models.tiny import TinyShape, tiny_config
from trainer.parallel.ac_and_compile import prepare_blocks
from trainer.parallel.axes import AXES
from trainer.parallel.packing import Packing
from trainer.parallel.shard import transformer_blocks
from trainer.plan.activations import TensorMemory, head_bytes, trace
from trainer.plan.model_shape import shape_of
from trainer.plan.workload import Row

ALONE = dict.fromkeys(AXES, 1)
ROW = Row((256, 256, 256, 256), None, 768)
SHARED = Row((256,) * 4, (0, 64, 64, 64), 768)


def config(mode: str = "none", **tiny) -> Config:
    cfg = Config()
    cfg.model.tiny = TinyShape(**{"hidden_size": 128, "intermediate_size": 384, "num_layers": 6, **tiny})
    cfg.trainer.policy.fsdp.activation_checkpointing = mode
    return cfg


def traced(cfg: Config, row: Row = ROW, device: str = "cpu", **sizes: int):
    """Return the activations of both kinds of passes."""
    role = policy_role(cfg)
    arguments = cfg, role, shape_of(cfg, role, ALONE), {**ALONE, **sizes}, row, device
    scores, update = trace(*arguments, backward=False), trace(*arguments, backward=True)
    return dataclasses.replace(update, forward=scores.forward)


def test_views_count_once_and_what_is_freed_no_more():
    with FakeTensorMode(), TensorMemory() as memory:
        tensor = torch.empty(100)
        view = tensor.view(10, 10)
        assert memory.now == 400
        view.add_(1)
        assert (memory.now, memory.peak) == (400, 400)
        other = torch.empty(50)
        del tensor, view
        assert (memory.now, memory.peak) == (200, 600)
        del other
    assert memory.now == 0


def test_every_block_saves_as_much_and_what_is_recomputed_is_not_saved():
    saved = [traced(config(num_layers=layers)).saved for layers in (2, 4, 8)]
    assert (saved[2] - saved[1]) == pytest.approx(2 * (saved[1] - saved[0]), rel=1e-6)
    none, selective, full = (traced(config(mode)) for mode in ("none", "selective", "full"))
    assert selective.saved < 0.75 * none.saved and full.saved < 0.4 * selective.saved
    assert full.peak < selective.peak < none.peak
    assert none.forward == full.forward < none.saved


def test_ranks_along_tp_and_cp_and_shared_prompts_save_less():
    alone = traced(config())
    assert 0.45 < traced(config(), cp=2).saved / alone.saved < 0.6
    assert 0.4 < traced(config(), tp=2).saved / alone.saved < 0.85  # the residual stream is on all ranks
    assert traced(config(), SHARED).saved < alone.saved


def test_the_kernel_of_gpus_is_traced_without_one():
    cfg, row = config(), SHARED
    for sizes in ({}, {"cp": 2}):
        cfg.trainer.policy.fsdp.param_dtype = "bfloat16"
        on_gpu, on_cpu = traced(cfg, row, "cuda", **sizes), traced(cfg, row, "cpu", **sizes)
        assert 0 < on_gpu.saved <= on_cpu.saved * 1.1, sizes
        cfg.trainer.policy.fsdp.param_dtype = "float32"
        assert traced(cfg, row, "cuda", **sizes).saved > 1.5 * on_gpu.saved, sizes


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


def saved_by(mode: str, row: Row, cfg: Config) -> int:
    """The bytes that a forward pass of compiled blocks in bfloat16 leaves for the backward pass, without weights."""
    shape = tiny_config(cfg.model.tiny)
    lm = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16, attn_implementation="sdpa")
    set_attention(lm)
    body, packing, found = lm.base_model, Packing(row.lengths, "cpu", None, row.prefix_lengths), {}
    weights = {parameter.untyped_storage()._cdata for parameter in lm.parameters()}
    prepare_blocks(transformer_blocks(body), FSDPConfig(activation_checkpointing=mode), compiled=True)
    body.train()

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            found[storage._cdata] = storage
        return tensor

    inputs = torch.randn(1, packing.tokens, shape.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        body(inputs_embeds=inputs, use_cache=False, **packing_arguments(body.config, packing))
    return sum(storage.nbytes() for storage in found.values())


@pytest.mark.release
def test_compiled_blocks_save_what_the_plan_says(monkeypatch):
    without_kernels(monkeypatch)
    mode = "selective"
    cfg = config(mode, hidden_size=256, intermediate_size=768, num_layers=3, head_dim=64)
    cfg.trainer.policy.fsdp = FSDPConfig(activation_checkpointing=mode, param_dtype="bfloat16", compile=True)
    planned = traced(cfg, SHARED, "cuda").saved
    assert saved_by(mode, SHARED, cfg) == pytest.approx(planned, rel=0.07)
    cfg.trainer.policy.fsdp.compile = False
    assert traced(cfg, SHARED, "cuda").saved > 1.05 * planned


def taken_on_gpu(entropy: str | None, head: Head, dtype: torch.dtype) -> tuple[int, int]:
    """The most bytes of forward and backward pass of the output layer with the chunks of a GPU, not compiled."""
    targets, rows, width = 8192, 40_000, 64
    context = SimpleNamespace(needs_input_grad=(True, True), mark_non_differentiable=lambda _: None)
    context.save_for_backward = lambda *tensors: setattr(context, "saved_tensors", tensors)
    with FakeTensorMode(), torch.no_grad():
        weight, hidden = (torch.empty(count, width, dtype=dtype) for count in (rows, targets))
        ids, slopes = (torch.zeros(targets, dtype=kind) for kind in (torch.long, torch.float32))
        with TensorMemory() as memory:
            _ChunkedScores.forward(context, hidden, weight, ids, head, 1.0, entropy)
            forward = memory.peak
        with TensorMemory() as memory:
            _ChunkedScores.backward(context, slopes, slopes if entropy else None)
    return forward, memory.peak


def test_the_output_layer_of_a_gpu_takes_what_its_operators_hold(monkeypatch):
    monkeypatch.setitem(logprobs._CHUNK_TOKENS, "cpu", 4096)
    monkeypatch.setattr(logprobs, "_CHUNK_LOGITS", 4096 * 40_000)
    pieces = logprobs._pieces
    monkeypatch.setattr(logprobs, "_pieces", lambda *given: (*pieces(*given)[:2], None))
    monkeypatch.setattr(logprobs, "_add_product", lambda *_: None)  # it takes nothing on a GPU
    row = Row((8193,), None, 8192)
    for dtype in (torch.float32, torch.bfloat16):
        for head in (Head(), Head(softcap=30.0)):
            for entropy in (None, "value", "gradient"):
                planned = head_bytes(
                    40_000, 64, row, dtype.itemsize, "cuda", True, entropy, softcap=head.softcap is not None
                )
                taken = max(taken_on_gpu(entropy, head, dtype))
                assert max(planned) == pytest.approx(taken, rel=0.03), (dtype, head, entropy)


def test_a_compiled_softmax_holds_logits_and_their_gradients_alone():
    rows, row, logits = 150_000, Row((16_384,), None, 16_000), 4096 * 150_000
    for itemsize in (2, 4):
        scores, update = head_bytes(rows, 64, row, itemsize, "cuda", False, "value", compiled=True)
        assert scores == pytest.approx(4 * logits, rel=0.01)
        assert update == pytest.approx((4 + itemsize) * logits, rel=0.02)
