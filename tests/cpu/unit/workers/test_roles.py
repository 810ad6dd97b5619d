"""Models beside policy, critic and reference are entries of the list of roles."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.support.ranks import run_ranks
from tests.support.whole_batches import compute_batch
from trainer.config import SCORE, Config, RoleSpec, policy_role
from trainer.models.tiny import TinyShape, build_tiny
from trainer.workers.base import TrainedWorker
from trainer.workers.rank import Rank

WIDTH = 10


def make_batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    lengths = np.array([10, 7, 4, 6, 9])
    mask = (np.arange(WIDTH) < lengths[:, None]) & (np.arange(WIDTH) > 0)
    ids = rng.integers(3, 256, (len(lengths), WIDTH))
    return {"input_ids": ids, "mask": mask.astype(np.float32), "lengths": lengths, "group_ids": np.arange(5)}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[str, str]:
    """The policy, and another model with the head of a reward model."""
    paths = [str(tmp_path_factory.mktemp(name)) for name in ("policy", "other")]
    for seed, path in enumerate(paths):
        build_tiny(
            TinyShape(hidden_size=32, intermediate_size=32, num_layers=1, num_heads=2, head_dim=16, seed=seed), path
        )
    file = Path(paths[1], "model.safetensors")
    head = torch.randn(1, 32, generator=torch.Generator().manual_seed(1))
    save_file({**load_file(file), "score.weight": head}, file, metadata={"format": "pt"})
    return paths[0], paths[1]


def score_all(rank: Rank, path: str, other: str) -> dict:
    specs = [
        policy_role(rank.cfg),
        RoleSpec("teacher", path=other, path_key="teacher", computes="teacher_logprobs"),
        RoleSpec("judge", path=other, head=SCORE, path_key="judge", computes="scores"),
    ]
    rank.build(specs, path)
    batch = make_batch()
    assert [isinstance(worker, TrainedWorker) for worker in rank.roles.values()] == [True, False, False]
    assert not any(p.requires_grad for name in ("teacher", "judge") for p in rank.roles[name].module.parameters())
    rows, scores = compute_batch(rank, "judge", "values", batch)
    return {
        "rows": rows,
        "scores": scores,
        "logprobs": [compute_batch(rank, n, "logprobs", batch) for n in ("policy", "teacher")],
    }


def test_a_frozen_teacher_and_a_reward_model_of_another_path_score_as_in_transformers(models):
    batch = make_batch()
    results = run_ranks(2, score_all, *models, cfg=Config())
    for index, path in enumerate(models):
        model = AutoModelForCausalLM.from_pretrained(path)
        for rows, logprobs in (result["logprobs"][index] for result in results):
            for row, found in zip(rows, logprobs, strict=True):
                ids = torch.from_numpy(batch["input_ids"][row, : batch["lengths"][row]])
                expected = torch.log_softmax(model(ids[None]).logits[0, :-1], -1).gather(1, ids[1:, None])[:, 0]
                assert found[1 : len(ids)] == pytest.approx(expected.detach().numpy(), abs=1e-5)
    judge = AutoModelForSequenceClassification.from_pretrained(models[1], num_labels=1, pad_token_id=0)
    for result in results:
        for row, found in zip(result["rows"], result["scores"], strict=True):
            ids = torch.from_numpy(batch["input_ids"][row, : batch["lengths"][row]])
            assert found[len(ids) - 1] == pytest.approx(judge(ids[None]).logits.item(), abs=1e-5)
            assert not found[len(ids) :].any()
