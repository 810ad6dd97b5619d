"""Forward and backward passes in bfloat16 on CPU, with float32 weights and sums over ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.support.architectures import VOCABULARY, WITH_BUFFERS, random_model
from tests.support.ranks import run_ranks
from tests.support.roles import roles
from tests.support.training import assembled, config, load_then_step, make_batch, save_then_step, train_two_steps
from tests.support.whole_batches import compute_batch, update_batch
from trainer.config import Config, FSDPConfig
from trainer.models.tiny import TinyShape, build_tiny
from trainer.workers.rank import Rank


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("model"))
    build_tiny(TinyShape(hidden_size=64, intermediate_size=128, seed=3), path)
    return path


def computing_in(dtype: str, **trainer: Any) -> Config:
    cfg = config(**trainer)
    cfg.trainer.policy.fsdp = FSDPConfig(param_dtype=dtype)
    for role in (cfg.trainer.policy, cfg.trainer.critic):
        role.optimizer.lr = 1e-6  # so that results differ by the rounding of one pass alone
    return cfg


def train_and_look(rank: Rank, path: str) -> dict[str, Any]:
    result = train_two_steps(rank, path)
    dtypes = {role: {p.dtype for p in worker.module.parameters()} for role, worker in rank.roles.items()}
    return result | {"dtypes": dtypes}


def test_a_resume_in_bfloat16_is_exact_to_the_last_bit(model_path, tmp_path):
    cfg = computing_in("bfloat16", max_tokens_per_micro_batch=70)
    uninterrupted = run_ranks(2, save_then_step, model_path, str(tmp_path), cfg=cfg)[0]
    assert run_ranks(2, load_then_step, model_path, str(tmp_path), cfg=cfg)[0] == uninterrupted


def test_bfloat16_is_near_float32_on_any_number_of_ranks(model_path):
    exact = run_ranks(1, train_two_steps, model_path, cfg=computing_in("float32"))
    one = run_ranks(1, train_and_look, model_path, cfg=computing_in("bfloat16"))
    two = run_ranks(2, train_and_look, model_path, cfg=computing_in("bfloat16", max_tokens_per_micro_batch=70))
    float32, bfloat16 = {torch.float32}, {torch.bfloat16}
    assert one[0]["dtypes"] == {"policy": float32, "critic": float32, "reference": bfloat16}
    mask = make_batch()["mask"]
    for result in (one, two):
        difference = np.abs(assembled(result, "logprobs") - assembled(exact, "logprobs")) * mask
        assert 0 < difference.max() < 0.1 and difference.sum() / mask.sum() < 0.01
        for ours, theirs in zip(result[0]["metrics"], exact[0]["metrics"], strict=True):
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=0.05)
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=0.05, abs=0.01)


def look_at_a_gate(rank: Rank, path: str) -> dict[str, set[torch.dtype]]:
    """The dtypes in which the weights of a block are read, by role and module."""
    rank.build(roles(rank.cfg, ["policy", "reference"]), path)
    batch, found = make_batch(), {}
    batch["input_ids"] %= VOCABULARY
    for role in ("policy", "reference"):
        module = rank.roles[role].module
        for name in ("mlp.gate", "self_attn.q_proj"):
            seen = found.setdefault(f"{role} {name}", set())
            layer = module.get_submodule(f"model.layers.1.{name}")
            layer.register_forward_pre_hook(lambda layer, _, seen=seen: seen.add(layer.weight.dtype))
        compute_batch(rank, role, "logprobs", batch)
    update_batch(rank, "policy", batch, 1)
    return found


def test_weights_that_a_class_keeps_in_float32_are_not_cast(tmp_path):
    random_model(WITH_BUFFERS["ernie4_5_moe"], "eager").save_pretrained(tmp_path)
    for found in run_ranks(2, look_at_a_gate, str(tmp_path), cfg=computing_in("bfloat16")):
        for name, dtypes in found.items():
            assert dtypes == {torch.float32 if name.endswith("gate") else torch.bfloat16}, name
