"""Cross-entropy: its loss, its one optimizer step, and the names of its metrics."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.tables import table
from trainer.config import Config
from trainer.objectives import Outputs
from trainer.objectives.cross_entropy import CrossEntropy
from trainer.parallel.batching import take_rows


def batch(**further) -> dict[str, np.ndarray]:
    mask = np.array([[0, 1, 1], [0, 0, 1]], np.float32)
    ids = np.arange(6).reshape(2, 3)
    return {"input_ids": ids, "mask": mask, "lengths": np.full(2, 3), "group_ids": np.arange(2), **further}


def loss_of(cfg: Config, arrays: dict[str, np.ndarray], rows=range(2)) -> tuple[float, dict[str, float]]:
    made, mb = CrossEntropy(cfg), take_rows(arrays, rows, "cpu")
    logprobs = torch.log(torch.tensor([[0.9, 0.5, 0.25], [0.9, 0.9, 0.125]])[: len(mb["mask"])])
    entropy = torch.ones_like(logprobs) if made.entropy(arrays) else None
    loss, metrics = made.loss("policy", Outputs(logprobs, entropy), mb, made.totals("policy", arrays), {})
    return loss.item(), {name: value.item() for name, value in metrics.items()}


def test_the_loss_is_the_mean_over_the_tokens_to_learn():
    loss, metrics = loss_of(Config(), batch())
    assert loss == pytest.approx(np.log([2, 4, 8]).mean()) and metrics == {}
    assert loss_of(Config(), batch(), rows=[])[0] == 0.0


@table("max_weight", [None, 1.5])
def test_tokens_that_another_policy_sampled_are_weighted_and_measured(max_weight):
    cfg = Config()
    cfg.sft.max_weight = max_weight
    sampled = np.log(np.array([[1, 0.25, 0.25], [1, 1, 0.25]], np.float32))  # ratios 2, 1, 0.5
    loss, metrics = loss_of(cfg, batch(rollout_logprobs=sampled))
    weights = np.array([1, 1, 1]) if max_weight is None else np.array([1.5, 1, 0.5])
    assert loss == pytest.approx((weights * np.log([2, 4, 8])).mean())
    assert metrics.keys() == {"kl", "clip_frac", "entropy"}
    assert metrics["clip_frac"] == pytest.approx(0 if max_weight is None else 1 / 3)
    names = CrossEntropy(cfg).metric_names("policy", ["loss", "kl", "clip_frac", "entropy", "grad_norm", "lr"])
    own = ["sft/loss", "sft/kl", "sft/clip_frac"]
    assert names == [*own, "policy/entropy", "policy/grad_norm", "policy/lr"]


def test_a_step_is_one_optimizer_step_on_all_rows():
    made = CrossEntropy(Config())
    assert [rows.tolist() for rows in made.mini_batches(batch(), 1)] == [[0, 1]]
    assert made.temperature == 1.0 and made.computes(batch(), 1) == []
