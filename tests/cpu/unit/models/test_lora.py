"""Adapters and moving references over real process groups."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load, load_file
from transformers import AutoModelForCausalLM

from tests.support.ranks import run_ranks
from tests.support.roles import roles
from tests.support.tables import table
from tests.support.training import (
    assembled,
    assert_close,
    config,
    first_step,
    load_then_step,
    make_batch,
    save_then_step,
    update,
)
from tests.support.whole_batches import compute_batch
from trainer.checkpoint.sharded import ShardedFiles
from trainer.config import Config, LoraConfig
from trainer.errors import UserError
from trainer.models.tiny import TinyShape, build_tiny
from trainer.workers.rank import Rank

pytestmark = pytest.mark.early
MASK = make_batch()["mask"] > 0


@pytest.fixture(scope="module")
def computed() -> dict[Any, Any]:
    """Models, and what one rank computes with them. Tests change between the two models."""
    return {}


@pytest.fixture
def model_path(request, computed, tmp_path_factory) -> str:
    tied = getattr(request, "param", True)
    if tied not in computed:
        path = computed[tied] = str(tmp_path_factory.mktemp("model"))
        build_tiny(TinyShape(hidden_size=64, intermediate_size=128, tie_word_embeddings=tied, seed=3), path)
    return computed[tied]


def lora_config(**trainer) -> Config:
    cfg = config(max_tokens_per_micro_batch=70, **trainer)
    cfg.trainer.policy.lora = LoraConfig(rank=5, alpha=8)  # no rank divides 5
    return cfg


def train(rank: Rank, path: str, out: str) -> dict:
    rank.build(roles(rank.cfg, ["policy", "critic", "reference"]), path)
    batch = make_batch()
    rows, start = compute_batch(rank, "policy", "logprobs", batch)
    metrics = [update(rank, role, batch, step) for step in (1, 2) for role in ("critic", "policy")]
    rank.call("policy", "write_weights", out, "float32")
    streamed = {name: tensor.clone() for name, tensor in rank.roles["policy"].stream_weights("float32")}
    held = {f"{role}.{name}" for role in ("policy", "critic") for name in rank.roles[role].state()["model"]}
    return {
        "metrics": metrics,
        "rows": rows,
        "start": start,
        "logprobs": compute_batch(rank, "policy", "logprobs", batch)[1],
        "reference": compute_batch(rank, "reference", "logprobs", batch)[1],
        "values": compute_batch(rank, "critic", "values", batch)[1],
        "adapter": [rank.call("policy", *call) for call in (("adapter_config", path), ("adapter_weights",))],
        "streamed": streamed,
        "held": held,
        "parameters": rank.call("policy", "num_parameters"),
    }


@pytest.fixture
def single_rank(model_path, computed, tmp_path_factory):
    if model_path not in computed:
        out = str(tmp_path_factory.mktemp("one"))
        computed[model_path] = run_ranks(1, train, model_path, out, cfg=lora_config())[0], out
    return computed[model_path]


def logprobs_of(model) -> np.ndarray:
    with torch.no_grad():
        ids = torch.from_numpy(make_batch()["input_ids"])
        logprobs = model(ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        return torch.nn.functional.pad(logprobs, (1, 0)).numpy()


def test_adapters_do_not_depend_on_the_layout(model_path, single_rank, tmp_path):
    expected, out = single_rank
    axes = {"tensor_parallel_size": 2, "context_parallel_size": 2}
    results = run_ranks(4, train, model_path, str(tmp_path), cfg=lora_config(**axes))
    for ours, theirs in zip(results[0]["metrics"], expected["metrics"], strict=True):
        assert_close(ours, theirs)
    for name in ("logprobs", "values"):
        difference = (assembled(results, name) - assembled([expected], name))[MASK]
        assert np.abs(difference).max() < 1e-4
    ours, theirs = load_file(tmp_path / "model.safetensors"), load_file(f"{out}/model.safetensors")
    assert set(ours) == set(theirs)
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-5) for name in ours)
    assert all(torch.equal(results[1]["streamed"][name], ours[name]) for name in ours)
    assert results[0]["adapter"][0] == expected["adapter"][0] and results[1]["adapter"][1] is None
    ours, theirs = (load(result["adapter"][1]) for result in (results[0], expected))
    assert set(ours) == set(theirs)
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-5) for name in ours)


def test_only_adapters_are_trained_and_saved(model_path, single_rank):
    result, out = single_rank
    start, merged = load_file(f"{model_path}/model.safetensors"), load_file(f"{out}/model.safetensors")
    changed = {name for name in start if not torch.equal(start[name], merged[name])}
    assert changed == {name for name in start if name.endswith("_proj.weight")}
    assert all("lora_" in name or name == "critic.value_head.weight" for name in result["held"])
    assert len(result["held"]) == 2 * (2 * 7 * 2) + 1  # two blocks of seven layers, of the policy and of the critic
    total, trained = result["parameters"]
    assert trained == sum(5 * sum(start[name].shape) for name in changed)
    assert total == trained + sum(tensor.numel() for tensor in start.values())
    # Without its adapters the policy is what it was: the reference, to the last bit.
    assert np.array_equal(assembled([result], "reference"), assembled([result], "start"))
    assert np.abs(result["logprobs"] - result["start"]).max() > 1e-2


def test_merged_weights_and_peft_equal_the_ranks(model_path, single_rank, tmp_path):
    from peft import PeftModel

    result, out = single_rank
    expected = assembled([result], "logprobs")
    merged = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    merged.load_state_dict(load_file(f"{out}/model.safetensors"), strict=False)
    assert np.abs(logprobs_of(merged) - expected)[MASK].max() < 1e-5
    text, weights = result["adapter"]
    (tmp_path / "adapter_config.json").write_text(text)
    (tmp_path / "adapter_model.safetensors").write_bytes(weights)
    base = AutoModelForCausalLM.from_pretrained(json.loads(text)["base_model_name_or_path"], dtype=torch.float32)
    assert np.abs(logprobs_of(PeftModel.from_pretrained(base, tmp_path)) - expected)[MASK].max() < 1e-5


def test_adapters_resume_under_any_layout(model_path, tmp_path):
    """Two ranks save, and two others split the matrices. `kills/test_killed_jobs.py` has the same layout."""
    directory = str(tmp_path)
    uninterrupted = run_ranks(2, save_then_step, model_path, directory, cfg=lora_config())[0]
    results = run_ranks(2, load_then_step, model_path, directory, cfg=lora_config(tensor_parallel_size=2))[0]
    for ours, theirs in zip(results, uninterrupted, strict=True):
        assert_close(ours, theirs)


def first_weights(rank: Rank, path: str) -> list[dict[str, torch.Tensor]]:
    """The weights of new adapters, of two seeds."""
    found = []
    for seed in (1, 2):
        rank.cfg = lora_config(seed=seed)
        rank.build(roles(rank.cfg, ["policy"]), path)
        found.append({name: tensor.clone() for name, tensor in load(rank.call("policy", "adapter_weights")).items()})
    return found


def test_each_adapter_starts_with_different_values_and_without_effect(model_path):
    (starts,) = run_ranks(1, first_weights, model_path, cfg=lora_config())
    down = [tensor for start in starts for name, tensor in start.items() if "lora_A" in name]
    up = [tensor for start in starts for name, tensor in start.items() if "lora_B" in name]
    assert len(down) == len(up) == 2 * 2 * 7  # two seeds, two blocks of seven layers
    assert len({tuple(tensor.flatten()[:8].tolist()) for tensor in down}) == len(down)
    assert not any(tensor.any() for tensor in up)
    for tensor in down:
        bound = tensor.shape[1] ** -0.5
        assert 0.9 * bound < tensor.abs().max() <= bound and abs(tensor.mean()) < 0.2 * bound


def low_precision(rank: Rank, path: str) -> tuple[set, dict]:
    rank.build(roles(rank.cfg, ["policy"]), path)
    kinds = {(p.requires_grad, p.dtype) for p in rank.roles["policy"].module.parameters()}
    return kinds, update(rank, "policy", make_batch(), 1)


def test_frozen_weights_are_stored_in_the_forward_dtype(model_path, single_rank):
    cfg = lora_config()
    cfg.trainer.policy.fsdp.param_dtype = "bfloat16"
    kinds, metrics = run_ranks(1, low_precision, model_path, cfg=cfg)[0]
    assert kinds == {(True, torch.float32), (False, torch.bfloat16)}
    assert metrics["grad_norm"] == pytest.approx(single_rank[0]["metrics"][1]["grad_norm"], rel=0.05)


@table("mode", ["selective", "full"])
def test_recomputed_activations_give_adapters_the_same_gradients(model_path, single_rank, mode):
    cfg = lora_config()
    cfg.trainer.policy.fsdp.activation_checkpointing = mode
    assert_close(run_ranks(1, first_step, model_path, cfg=cfg)[0], single_rank[0]["metrics"][1])


def left_out(rank: Rank, path: str) -> list[dict]:
    """With one mini-batch, then both, without a token to learn."""
    rank.build(roles(rank.cfg, ["policy"]), path)
    found = []
    for rows in (range(0), range(12), range(24)):
        batch = make_batch()
        order = np.argsort(np.isin(batch["group_ids"], [0, 1, 2]))  # any three groups
        batch["mask"][order[list(rows)]] = 0
        found.append(update(rank, "policy", batch, 1))
    return found


def test_the_kl_covers_only_trained_tokens(model_path):
    cfg = lora_config(mini_batch_size=1)
    cfg.trainer.policy.optimizer.lr = 0.0  # so that mini-batches do not depend on those before
    whole, half, nothing = run_ranks(1, left_out, model_path, cfg=cfg)[0]
    assert half["kl"] > 0.5 * whole["kl"] > 0 and "kl" not in nothing


def refusal(rank: Rank, path: str) -> str:
    with pytest.raises(UserError) as error:
        rank.build(roles(rank.cfg, ["policy"]), path)
    return str(error.value)


def test_unknown_target_modules_are_refused(model_path):
    cfg = lora_config()
    cfg.trainer.policy.lora.target_modules = ["q_proj", "query"]
    (said,) = run_ranks(1, refusal, model_path, cfg=cfg)
    assert "trainer.policy.lora.target_modules: the model has no linear layer query; it has" in said


# ----------------------------------------------------------------------------------------------------------
# A reference that moves


def move_reference(rank: Rank, path: str, directory: str) -> dict:
    rank.build(roles(rank.cfg, ["policy", "reference"]), path)
    batch = make_batch()
    rows, before = compute_batch(rank, "reference", "logprobs", batch)
    update(rank, "policy", batch, 1)
    moved = compute_batch(rank, "policy", "logprobs", batch)[1]
    rank.call("reference", "sync_from_policy")
    after = compute_batch(rank, "reference", "logprobs", batch)[1]
    rank.begin_save(["policy", "reference"], ShardedFiles(directory))
    update(rank, "policy", batch, 2)
    rank.call("reference", "sync_from_policy")  # while the one before is being written
    rank.finish_save()
    return {"rows": rows, "before": before, "moved": moved, "after": after}


def load_reference(rank: Rank, path: str, directory: str) -> dict:
    rank.build(roles(rank.cfg, ["policy", "reference"]), path)
    rank.call("reference", "load", ShardedFiles(directory), ("weights", "optimizer", "rng"))
    rows, loaded = compute_batch(rank, "reference", "logprobs", make_batch())
    return {"rows": rows, "loaded": loaded}


@pytest.mark.parametrize(
    "model_path, lora, keep",
    [(True, True, False), (False, False, True)],
    indirect=["model_path"],
    ids=["tied, lora, reshard", "untied, full, keep"],
)
def test_a_refreshed_reference_is_saved_and_restored(model_path, tmp_path, lora, keep):
    """Also where a forward pass leaves whole parameters behind."""
    cfg = lora_config() if lora else config(max_tokens_per_micro_batch=70)
    cfg.trainer.policy.fsdp.reshard_after_forward = not keep
    cfg.algorithm.ref_sync_interval = 1
    results = run_ranks(2, move_reference, model_path, str(tmp_path), cfg=cfg)
    moved, after = assembled(results, "moved"), assembled(results, "after")
    assert np.abs(moved - after)[MASK].max() < (1e-5 if lora else 1e-30)  # merging rounds
    assert np.abs(after - assembled(results, "before"))[MASK].max() > 1e-2
    loaded = run_ranks(1, load_reference, model_path, str(tmp_path), cfg=cfg)
    assert np.abs(assembled(loaded, "loaded") - after)[MASK].max() < 1e-5
