"""Supervised steps on packed rows against plain transformers, one example at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.ranks import run_ranks
from trainer.config import Config, TinyConfig
from trainer.models.tiny import build_tiny
from trainer.parallel.batching import Batch
from trainer.workers.rank import Rank

EXAMPLES = [[(5, 2), (7, 3)], [(9, 1)], [(4, 3), (6, 2)]]  # of each row: tokens, and how many of them are the prompt
WIDTH, MAX_WEIGHT = 12, 0.9


def packed() -> Batch:
    rng = np.random.default_rng(1)
    shape = (len(EXAMPLES), WIDTH)
    ids, positions = rng.integers(0, 256, shape), np.zeros(shape, np.int64)
    mask, logprobs = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    for row, examples in enumerate(EXAMPLES):
        start = 0
        for tokens, prompt in examples:
            positions[row, start : start + tokens] = np.arange(tokens)
            mask[row, start + prompt : start + tokens] = 1
            start += tokens
        positions[row, start:] = np.arange(WIDTH - start)
    logprobs = (-5.6 + 0.4 * rng.normal(size=shape).astype(np.float32)) * mask
    return {"input_ids": ids, "position_ids": positions, "loss_mask": mask, "old_logprobs": logprobs,
            "lengths": np.full(len(EXAMPLES), WIDTH)}  # fmt: skip


def plain(path: str, batch: Batch, max_weight: float | None) -> dict[str, float]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    terms, log_ratios = [], []
    for row, examples in enumerate(EXAMPLES):
        start = 0
        for tokens, prompt in examples:
            ids = torch.from_numpy(batch["input_ids"][row, start : start + tokens])
            logp = torch.log_softmax(model(ids[None]).logits[0], dim=-1)
            for t in range(prompt, tokens):
                chosen = logp[t - 1, ids[t]]
                log_ratios.append(chosen.item() - float(batch["old_logprobs"][row, start + t]))
                weight = 1.0 if max_weight is None else min(float(np.exp(log_ratios[-1])), max_weight)
                terms.append(-weight * chosen)
            start += tokens
    loss = sum(terms) / len(terms)
    loss.backward()
    norm = torch.sqrt(sum(p.grad.square().sum() for p in model.parameters()))
    found = {"loss": loss.item(), "grad_norm": norm.item(), "lr": 1e-3}
    if max_weight is None:
        return found
    r = np.exp(log_ratios)
    assert 0.2 < np.mean(r > max_weight) < 0.8
    return {**found, "kl": float(np.mean(r - 1 - log_ratios)), "clip_frac": float(np.mean(r > max_weight))}


def supervised_step(rank: Rank, path: str, batch: Batch, max_weight: float | None) -> tuple[float, dict[str, float]]:
    rank.build(["policy"], path, {"policy": 10})
    return rank.supervised_loss(batch), rank.supervised_update(batch, max_weight)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_supervised_step_equals_plain_pytorch(tmp_path, ranks):
    build_tiny(TinyConfig(hidden_size=64, intermediate_size=64, num_layers=2, seed=3), str(tmp_path))
    cfg, batch = Config(), packed()
    cfg.trainer.policy.optimizer.lr = 1e-3
    cfg.trainer.max_tokens_per_micro_batch = WIDTH
    unweighted = plain(str(tmp_path), batch, None)
    for max_weight in (None, MAX_WEIGHT):
        expected = plain(str(tmp_path), batch, max_weight)
        for loss, metrics in run_ranks(ranks, supervised_step, str(tmp_path), batch, max_weight, cfg=cfg):
            assert loss == pytest.approx(unweighted["loss"], rel=1e-5)
            assert metrics == pytest.approx(expected, rel=2e-5, abs=1e-7)
