"""The learning rate of every optimizer step: warm-up, then constant or cosine. The state of the optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.architectures import VOCABULARY, WITH_BUFFERS, random_model
from tests.support.ranks import run_ranks
from tests.support.roles import roles
from tests.support.tables import table
from tests.support.training import config, make_batch, update
from trainer.checkpoint.sharded import ShardedFiles
from trainer.config import OptimizerConfig
from trainer.parallel.batching import Batch
from trainer.workers.optimizers import Optimizers, learning_rate
from trainer.workers.rank import Rank


@table(
    "settings, total_steps, expected",
    [
        ({}, 3, [2.0, 2.0, 2.0, 2.0]),
        ({"warmup_steps": 4}, 6, [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]),
        ({"warmup_steps": 4, "min_lr_ratio": 0.5}, 2, [0.5, 1.0, 1.5, 2.0, 2.0]),
        # 1 + cos(0, 45, 90, 135 degrees); the floor is reached when the last step is done, and is never left.
        (
            {"scheduler": "cosine", "min_lr_ratio": 0.0},
            4,
            [2.0, 1.7071067811865475, 1.0, 0.2928932188134524, 0.0, 0.0, 0.0],
        ),
        ({"scheduler": "cosine", "min_lr_ratio": 0.1}, 2, [2.0, 1.1, 0.2, 0.2]),
        ({"scheduler": "cosine", "min_lr_ratio": 1.0}, 2, [2.0, 2.0, 2.0]),
        (
            {"scheduler": "cosine", "min_lr_ratio": 0.1, "warmup_steps": 2},
            6,
            [1.0, 2.0, 2.0, 1.7363961030678928, 1.1, 0.46360389693210724, 0.2, 0.2],
        ),
        ({"scheduler": "cosine", "warmup_steps": 3}, 3, [2 / 3, 4 / 3, 2.0, 2.0, 0.2]),
        ({"scheduler": "cosine", "warmup_steps": 3}, 1, [2 / 3, 4 / 3, 2.0, 2.0, 0.2]),
    ],
)
def test_the_learning_rate_of_each_step(settings, total_steps, expected):
    config = OptimizerConfig(lr=2.0, **settings)
    rates = [learning_rate(config, step, total_steps) for step in range(len(expected))]
    assert rates == pytest.approx(expected, rel=1e-14, abs=1e-15)


def small_batch() -> Batch:
    batch = make_batch()
    return {**batch, "input_ids": batch["input_ids"] % VOCABULARY}


def weights_after_two_steps(rank: Rank, path: str, saved_after: int | None, directory: str) -> list[dict[str, Any]]:
    """Return the weights before and after two steps, with a save after `saved_after` of them."""
    rank.build(roles(rank.cfg, ["policy"]), path)
    found = []
    for step in range(3):
        if step:
            update(rank, "policy", small_batch(), step)
        if step == saved_after:
            rank.begin_save(["policy"], ShardedFiles(directory))
            rank.finish_save()
        found.append(weights(rank))
    return found


def weights(rank: Rank) -> dict[str, torch.Tensor]:
    return {name: p.full_tensor().clone() for name, p in rank.roles["policy"].module.named_parameters()}


def save_at_each_step(rank: Rank, path: str, directory: str) -> list[list[dict[str, Any]]]:
    """Return `weights_after_two_steps` with saves, with resumes from them, and with the states that AdamW makes."""
    runs = [weights_after_two_steps(rank, path, step, f"{directory}/{step}") for step in (0, 1)]
    for saved in (0, 1):
        rank.build(roles(rank.cfg, ["policy"]), path)
        rank.call("policy", "load", ShardedFiles(f"{directory}/{saved}"), ("weights", "optimizer", "rng"))
        resumed = [*runs[saved][:saved], weights(rank)]
        for step in range(saved + 1, 3):
            update(rank, "policy", small_batch(), step)
            resumed.append(weights(rank))
        runs.append(resumed)
    Optimizers.make_states = lambda self: None
    return [weights_after_two_steps(rank, path, None, ""), *runs]


def test_a_save_and_a_resume_at_any_step_change_nothing_whatever_has_a_gradient(tmp_path):
    """The indexers of the model never have one, so AdamW leaves them alone, without a decay of their weights."""
    random_model(WITH_BUFFERS["deepseek_v32"], "sdpa").save_pretrained(tmp_path / "model")
    cfg = config()
    cfg.trainer.policy.optimizer.weight_decay = 0.2
    (expected, *others) = run_ranks(1, save_at_each_step, str(tmp_path / "model"), str(tmp_path), cfg=cfg)[0]
    for run in others:
        for ours, theirs in zip(run, expected, strict=True):
            assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []
    unchanged = {name for name in expected[0] if torch.equal(expected[0][name], expected[2][name])}
    assert unchanged == {name for name in expected[0] if ".indexer." in name}
