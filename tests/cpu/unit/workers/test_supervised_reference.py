"""A supervised step against plain transformers, one example at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.ranks import run_ranks
from tests.support.whole_batches import update_batch
from trainer.algorithms import Totals
from trainer.config import Config
from trainer.models.tiny import TinyShape, build_tiny
from trainer.parallel.batching import Batch
from trainer.parallel.load_balancing import divide
from trainer.workers.rank import Rank

EXAMPLES = [(5, 2), (7, 3), (9, 1), (4, 3), (6, 2)]  # tokens, and how many of them are the prompt
MAX_WEIGHT = 0.9


def make_batch(sampled: bool) -> Batch:
    rng = np.random.default_rng(1)
    lengths = np.array([tokens for tokens, _ in EXAMPLES])
    shape = (len(EXAMPLES), lengths.max())
    columns = np.arange(shape[1])
    mask = (columns >= np.array([prompt for _, prompt in EXAMPLES])[:, None]) & (columns < lengths[:, None])
    mask = mask.astype(np.float32)
    logprobs = (-5.6 + 0.4 * rng.normal(size=shape).astype(np.float32)) * mask
    batch = {
        "input_ids": rng.integers(0, 256, shape),
        "mask": mask,
        "lengths": lengths,
        "group_ids": np.zeros(len(EXAMPLES), np.int64),
    }
    return {**batch, "rollout_logprobs": logprobs} if sampled else batch


def plain(path: str, batch: Batch) -> dict[str, float]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    terms, log_ratios, entropies = [], [], []
    for row, (tokens, prompt) in enumerate(EXAMPLES):
        ids = torch.from_numpy(batch["input_ids"][row, :tokens])
        logp = torch.log_softmax(model(ids[None]).logits[0], dim=-1)
        for t in range(prompt, tokens):
            chosen, weight = logp[t - 1, ids[t]], 1.0
            if "rollout_logprobs" in batch:
                log_ratios.append(chosen.item() - float(batch["rollout_logprobs"][row, t]))
                weight = min(float(np.exp(log_ratios[-1])), MAX_WEIGHT)
            terms.append(-weight * chosen)
            entropies.append(-(logp[t - 1].exp() * logp[t - 1]).sum().item())
    loss = sum(terms) / len(terms)
    loss.backward()
    norm = torch.sqrt(sum(p.grad.square().sum() for p in model.parameters()))
    found = {"loss": loss.item(), "grad_norm": norm.item(), "lr": 1e-3}
    if not log_ratios:
        return found
    r = np.exp(log_ratios)
    assert 0.2 < np.mean(r > MAX_WEIGHT) < 0.8
    measured = {"kl": np.mean(r - 1 - log_ratios), "clip_frac": np.mean(r > MAX_WEIGHT), "entropy": np.mean(entropies)}
    return {**found, **{name: float(value) for name, value in measured.items()}}


def supervised_step(rank: Rank, path: str, batch: Batch) -> tuple[float, dict[str, float]]:
    rank.build(rank.cfg.roles, path)
    index, limits = rank.roles["policy"].limits()
    share = divide(batch, [np.arange(len(batch["lengths"]))], limits, rank.world_size)[index]
    totals = Totals.of(torch.from_numpy(batch["mask"]))
    return rank.call("policy", "evaluate", share, totals, {})["loss"], update_batch(rank, "policy", batch, 1).metrics


@pytest.mark.parametrize("sampled", [False, True], ids=["cross-entropy", "importance weights"])
def test_a_supervised_step_equals_plain_pytorch(tmp_path, sampled):
    build_tiny(TinyShape(hidden_size=64, intermediate_size=64, num_layers=2, seed=3), str(tmp_path))
    cfg, batch = Config(), make_batch(sampled)
    cfg.trainer.task = "sft"
    cfg.sft.optimizer.lr, cfg.sft.optimizer.warmup_steps = 1e-3, 0
    cfg.trainer.max_tokens_per_micro_batch = 12
    cfg.sft.max_weight = MAX_WEIGHT if sampled else None
    expected = plain(str(tmp_path), batch)
    for loss, metrics in run_ranks(2, supervised_step, str(tmp_path), batch, cfg=cfg):
        assert loss == pytest.approx(expected["loss"], rel=1e-5)
        assert metrics == pytest.approx(expected, rel=2e-5, abs=1e-7)
