"""A loss over pairs of rows, with a reference and metrics of its own, on ranks: against plain PyTorch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from tests.support.preferences import BETA
from tests.support.ranks import local_cluster, run_ranks
from tests.support.whole_batches import update_batch
from trainer.config import Config
from trainer.episodes import Episode, Sample
from trainer.learner.learner import Learner
from trainer.metrics.timing import Timer
from trainer.models.tiny import TinyShape, build_tiny
from trainer.parallel.batching import Batch
from trainer.workers.rank import Rank

PROMPT, WIDTH, LR = 2, 30, 1e-3
LENGTHS = [(30, 4), (5, 28), (26, 6), (7, 24), (22, 4)]
"""Tokens of the chosen and of the rejected row of each pair. A planner that may divide groups parts every pair."""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("model"))
    build_tiny(TinyShape(hidden_size=32, intermediate_size=32, num_layers=1, num_heads=2, head_dim=16, seed=3), path)
    return path


def config() -> Config:
    cfg = Config()
    t = cfg.trainer
    t.task = "tests.support.preferences:TASK"
    t.train_batch_size = t.mini_batch_size = len(LENGTHS)
    t.max_tokens_per_micro_batch = 36
    t.policy.optimizer.lr = LR
    t.policy.optimizer.max_grad_norm = 0.0
    return cfg


def make_batch() -> Batch:
    rng = np.random.default_rng(0)
    lengths = np.array(LENGTHS).flatten()
    columns = np.arange(WIDTH)
    mask = ((columns >= PROMPT) & (columns < lengths[:, None])).astype(np.float32)
    return {
        "input_ids": rng.integers(3, 256, mask.shape),
        "mask": mask,
        "lengths": lengths,
        "group_ids": np.repeat(np.arange(len(LENGTHS)), 2),
        "sign": np.tile([1.0, -1.0], len(LENGTHS)).astype(np.float32),
        "ref_logprobs": (-5.6 + 0.5 * rng.normal(size=mask.shape).astype(np.float32)) * mask,
    }


def plain(path: str, batch: Batch) -> dict[str, float]:
    model, gains = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), []
    for row, length in enumerate(batch["lengths"]):
        ids = torch.from_numpy(batch["input_ids"][row, :length])
        logp = torch.log_softmax(model(ids[None]).logits[0, :-1], -1).gather(1, ids[1:, None])[:, 0]
        gains.append((logp[PROMPT - 1 :] - torch.from_numpy(batch["ref_logprobs"][row, PROMPT:length])).sum())
    margins = torch.stack(gains).view(-1, 2).diff(dim=1)[:, 0].neg()
    loss = -F.logsigmoid(BETA * margins).mean()
    loss.backward()
    norm = torch.sqrt(sum(p.grad.square().sum() for p in model.parameters()))
    accuracy = (margins > 0).float().mean()
    found = {"loss": loss, "accuracy": accuracy, "margin": margins.mean(), "grad_norm": norm}
    return {name: value.item() for name, value in found.items()} | {"lr": LR}


def update(rank: Rank, path: str, batch: Batch) -> dict[str, float]:
    rank.build(rank.cfg.roles, path)
    return update_batch(rank, "policy", batch, 1).metrics


def test_a_loss_over_pairs_equals_plain_pytorch_though_two_ranks_share_the_pairs(model):
    batch = make_batch()
    expected = plain(model, batch)
    assert abs(expected["loss"] - math.log(2)) > 0.01, "the margins are not those of an untrained policy"
    for metrics in run_ranks(2, update, model, batch, cfg=config()):
        assert metrics == pytest.approx(expected, rel=2e-4, abs=1e-6)


def episodes() -> list[Episode]:
    batch, made = make_batch(), []
    for row, length in enumerate(batch["lengths"]):
        sample = Sample(batch["input_ids"][row, :length].astype(np.int32), batch["mask"][row, :length])
        made.append(Episode(str(row), str(row // 2), [sample], reward=float(row % 2 == 0)))
    return made


def test_the_reference_scores_each_step_and_the_policy_learns_to_prefer(model):
    found = []
    for ranks in (1, 2):
        with local_cluster(ranks, config()) as cluster:
            learner = Learner(cluster.cfg, cluster, Timer())
            learner.build(model)
            assert learner.ranks.saved_roles == ["policy"]
            steps = []
            for step in (1, 2, 3):
                experience = learner.make_experience(episodes(), step)
                assert "old_logprobs" not in experience.batch
                steps.append(learner.update(experience, step))
            found.append(steps)
    names = {"policy/loss", "policy/accuracy", "policy/margin", "policy/grad_norm", "policy/lr"}
    assert found[0][0].keys() == names
    assert found[0][0]["policy/loss"] == pytest.approx(math.log(2), abs=1e-4), "the policy is still the reference"
    assert found[0][-1]["policy/loss"] < 0.5 and found[0][-1]["policy/accuracy"] == pytest.approx(1.0)
    for one, two in zip(*found, strict=True):
        if one is found[0][0]:  # margins of 0 are positive or negative by rounding
            one, two = ({**metrics, "policy/accuracy": 0.0} for metrics in (one, two))
        assert one == pytest.approx(two, rel=1e-3, abs=1e-4)
