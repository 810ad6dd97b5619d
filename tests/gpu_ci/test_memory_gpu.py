"""What tensors of a rank take of a GPU's memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.memory import peak_bytes
from tests.support.ranks import run_ranks
from tests.support.roles import roles
from tests.support.training import config, left_after_scores, make_batch, update
from trainer.cluster.resources import rank_environment
from trainer.config import Config, FSDPConfig
from trainer.models.logprobs import Head, _add_product, _ChunkedScores
from trainer.workers.rank import Rank

VOCABULARY, WIDTH = 32768, 64


def test_log_probs_take_a_small_part_of_the_memory_of_all_logits(device):
    tokens = 65536 if device == "cuda" else 16384
    hidden = torch.randn(tokens, WIDTH, device=device, requires_grad=True)
    weight = torch.randn(VOCABULARY, WIDTH, device=device, requires_grad=True)
    targets = torch.zeros(tokens, dtype=torch.long, device=device)

    def run() -> None:
        logprobs, entropy = _ChunkedScores.apply(hidden, weight, targets, Head(), 1.0, "gradient")
        (logprobs.sum() + entropy.sum()).backward()

    run()  # kernels and their workspaces are loaded
    hidden.grad = weight.grad = None
    assert peak_bytes(run, device) < 0.3 * 4 * tokens * VOCABULARY


def test_gradients_of_the_output_layer_are_added_in_place(device):
    """In half precision, a product of a chunk is not a tensor of its own, which would be as large as the sum."""
    total = torch.randn(VOCABULARY, 512, device=device)
    a = torch.randn(VOCABULARY, 64, device=device, dtype=torch.bfloat16)
    b = torch.randn(64, 512, device=device, dtype=torch.bfloat16)
    expected = total.double() + a.double() @ b.double()
    if device == "cuda":
        _add_product(total.clone(), a, b)  # the workspace of the kernel is there
        assert peak_bytes(lambda: _add_product(total, a, b), device) < 0.1 * total.nbytes
        torch.testing.assert_close(total.double(), expected, atol=1e-3, rtol=1e-4)
    else:
        _add_product(total, a, b)
        torch.testing.assert_close(total.double(), expected, atol=0.3, rtol=0.02)


def in_bfloat16(cfg: Config) -> Config:
    cfg.trainer.policy.fsdp = FSDPConfig(param_dtype="bfloat16")
    return cfg


def build_reference(rank: Rank, path: str) -> tuple[int, int, set[torch.dtype]]:
    rank.build(roles(rank.cfg, ["policy"]), path)
    grown = peak_bytes(lambda: rank.build(roles(rank.cfg, ["reference"]), path), rank.device)
    parameters = list(rank.roles["reference"].module.parameters())
    return grown, sum(p.numel() for p in parameters), {p.dtype for p in parameters}


def test_the_reference_is_held_in_the_precision_of_its_forward_pass(device, wide_path):
    ((grown, parameters, dtypes),) = run_ranks(1, build_reference, wide_path, cfg=in_bfloat16(config()), device=device)
    assert dtypes == {torch.bfloat16}
    if device == "cuda":
        assert grown < 3 * parameters  # 4 bytes a parameter in float32


@pytest.mark.parametrize("offload", ["none", "optimizer"])
def test_scores_leave_no_memory_taken_beside_engines(device, wide_path, offload):
    cfg = in_bfloat16(config(offload=offload))
    ((gathered, grown),) = run_ranks(1, left_after_scores, wide_path, cfg=cfg, device=device)
    assert gathered == [] and grown < 2**20, (gathered, grown)


def step_optimizer(rank: Rank, path: str) -> tuple[int, int]:
    rank.build(roles(rank.cfg, ["policy"]), path)
    worker = rank.roles["policy"]
    update(rank, "policy", make_batch(), 1)  # the optimizer has its states
    for parameter in worker.module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return peak_bytes(worker.optimizers.step, rank.device), worker.num_parameters()[0]


def test_an_optimizer_step_makes_no_copy_of_the_parameters(device, wide_path):
    ((grown, parameters),) = run_ranks(1, step_optimizer, wide_path, cfg=config(), device=device)
    assert grown < parameters  # a copy in float32 takes 4 bytes a parameter


def train_many_shapes(rank: Rank, path: str) -> float:
    """The memory that torch holds on the GPU, as a multiple of what its tensors have needed at most."""
    rank.build(roles(rank.cfg, ["policy"]), path)
    rng = np.random.default_rng(0)
    for step in range(100):
        rows, width = int(rng.integers(1, 9)), int(rng.integers(64, 1024))
        lengths = rng.integers(8, width + 1, rows)
        lengths[0] = width
        mask = ((np.arange(width) >= 4) & (np.arange(width) < lengths[:, None])).astype(np.float32)
        batch = {
            "input_ids": rng.integers(0, 256, (rows, width)),
            "mask": mask,
            "lengths": lengths,
            "group_ids": np.zeros(rows, np.int64),
            "advantages": mask,
            "old_logprobs": -5.7 * mask,
        }
        if rank.device == "cuda" or step < 2:
            update(rank, "policy", batch, step + 1)
    if rank.device == "cpu":
        return 1.0
    return torch.cuda.max_memory_reserved() / torch.cuda.max_memory_allocated()


def test_memory_does_not_fragment_over_micro_batches_of_many_shapes(device, wide_path):
    cfg = in_bfloat16(config(max_tokens_per_micro_batch=4096))
    env = rank_environment(device, {})
    (held,) = run_ranks(1, train_many_shapes, wide_path, cfg=cfg, device=device, env=env)
    assert held < 1.25, held
    print(f"held / needed: {held:.3f} with {env}")


def adapters(rank: Rank, path: str) -> tuple[int, int, set[torch.dtype], float]:
    grown = peak_bytes(lambda: rank.build(roles(rank.cfg, ["policy"]), path), rank.device)
    module = rank.roles["policy"].module
    frozen = [p for p in module.parameters() if not p.requires_grad]
    metrics = [update(rank, "policy", make_batch(), step) for step in (1, 2)]
    return grown, sum(p.numel() for p in frozen), {p.dtype for p in frozen}, metrics[1]["loss"]


def test_adapters_on_frozen_weights_in_bfloat16_learn_like_those_in_float32(device, wide_path):
    pytest.importorskip("peft", reason="adapters need peft")
    results = {}
    for dtype in ("float32", "bfloat16"):
        cfg = config()
        cfg.trainer.policy.lora.rank = 8
        cfg.trainer.policy.fsdp = FSDPConfig(param_dtype=dtype)
        (results[dtype],) = run_ranks(1, adapters, wide_path, cfg=cfg, device=device)
    grown, frozen, dtypes, loss = results["bfloat16"]
    assert dtypes == {torch.bfloat16}
    if device == "cuda":
        assert grown < 3 * frozen < results["float32"][0]
    assert loss == pytest.approx(results["float32"][3], rel=0.05, abs=0.02)
