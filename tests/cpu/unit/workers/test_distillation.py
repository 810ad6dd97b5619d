"""The update of a policy that reads the distributions of a teacher, on ranks: against plain transformers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from tests.support.architectures import SHAPE, random_model
from tests.support.ranks import run_ranks
from tests.support.training import GROUPS, config, make_batch, update
from tests.support.whole_batches import compute_batch
from trainer.config.algorithm import TeacherConfig
from trainer.workers.rank import Rank

BETA, TEMPERATURE, WEIGHT = 0.3, 1.5, 0.7


def batch() -> dict[str, np.ndarray]:
    """Experience whose advantages are 0, so that the divergence is all of the loss."""
    made = make_batch()
    return made | {"advantages": np.zeros_like(made["advantages"])}


def distill(rank: Rank, path: str) -> dict[str, Any]:
    """Two updates; returns their metrics, the log-probs after them, and whether the teacher is as it was."""
    rank.build(list(rank.cfg.roles), path)
    teacher = rank.roles["teacher"].module
    before = [parameter.detach().full_tensor().clone() for parameter in teacher.parameters()]
    metrics = [update(rank, "policy", batch(), step) for step in (1, 2)]
    after = [parameter.detach().full_tensor() for parameter in teacher.parameters()]
    rows, logprobs = compute_batch(rank, "policy", "logprobs", batch())
    is_same = all(torch.equal(*pair) for pair in zip(before, after, strict=True)) and not teacher.training
    return {"metrics": metrics, "rows": rows, "logprobs": logprobs, "teacher is as it was": is_same}


def expected(policy: Path, teacher: Path) -> tuple[float, float]:
    """The divergence per token, and the norm of its gradient, one row at a time, written from the formula."""
    student, fixed = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64) for path in (policy, teacher))
    arrays, total = batch(), torch.zeros((), dtype=torch.float64)
    for ids, mask, length in zip(arrays["input_ids"], arrays["mask"], arrays["lengths"], strict=True):
        row = torch.from_numpy(ids[None, :length])
        q = (student(input_ids=row).logits[0, :-1] / TEMPERATURE).softmax(-1)
        with torch.no_grad():
            p = (fixed(input_ids=row).logits[0, :-1] / TEMPERATURE).softmax(-1)
        m = BETA * p + (1 - BETA) * q
        jsd = (BETA * p * (p / m).log() + (1 - BETA) * q * (q / m).log()).sum(-1)
        total = total + (jsd * torch.from_numpy(mask[1:length])).sum()
    mean = total / arrays["mask"].sum()
    (WEIGHT * mean).backward()
    norm = torch.stack(
        [parameter.grad.norm() for parameter in student.parameters() if parameter.grad is not None]
    ).norm()
    return mean.item(), norm.item()


def test_ranks_train_on_the_divergence_of_whole_distributions(tmp_path):
    """With adapters on 1 and 2 ranks, whose rows are packed, and with tensor parallelism, whose ranks have a slice."""
    for name, width in (("policy", 32), ("teacher", 64)):
        shape = Qwen3Config(**{**SHAPE, "vocab_size": 256, "hidden_size": width})
        random_model(shape, "sdpa").save_pretrained(tmp_path / name)
    divergence, norm = expected(tmp_path / "policy", tmp_path / "teacher")
    results = []
    for ranks, layout, adapter in [(1, {}, 4), (2, {}, 4), (2, {"tensor_parallel_size": 2}, None)]:
        cfg = config(num_workers=ranks, mini_batch_size=GROUPS, **layout)
        cfg.trainer.policy.lora.rank = adapter
        teacher = TeacherConfig(str(tmp_path / "teacher"), "jsd", BETA, TEMPERATURE)
        cfg.algorithm = dataclasses.replace(
            cfg.algorithm, kl_coef=0.0, entropy_coef=0.0, opd_kl_coef=WEIGHT, teacher=teacher
        )
        found = run_ranks(ranks, distill, str(tmp_path / "policy"), cfg=cfg)
        first, second = found[0]["metrics"]
        assert first["teacher_kl"] == pytest.approx(divergence, rel=1e-5), layout
        assert first["loss"] == pytest.approx(WEIGHT * divergence, rel=1e-5)
        assert second["teacher_kl"] < first["teacher_kl"] and all(one["teacher is as it was"] for one in found)
        if adapter is None:
            assert first["grad_norm"] == pytest.approx(norm, rel=1e-4)
        else:
            rows = np.concatenate([one["rows"] for one in found])
            logprobs = [np.pad(r, (0, 24 - len(r))) for one in found for r in one["logprobs"]]
            results.append(np.stack(logprobs)[np.argsort(rows)])
    np.testing.assert_allclose(*results, rtol=0, atol=2e-5)
