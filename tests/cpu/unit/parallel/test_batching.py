"""The split of a batch over ranks and micro-batches."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.parallel.batching import plan_micro_batches, take_rows


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 100), min_size=1, max_size=60),
    ranks=st.integers(1, 6),
    limit=st.integers(1, 900),
    quadratic=st.sampled_from([0.0, 0.01]),
)
def test_plan_contains_every_row_once_and_as_many_micro_batches_for_each_rank(lengths, ranks, limit, quadratic):
    plan = plan_micro_batches(lengths, ranks, limit, quadratic)
    assert len(plan) == ranks and len({len(micro_batches) for micro_batches in plan}) == 1
    rows = [row for micro_batches in plan for rows in micro_batches for row in rows]
    assert sorted(rows) == list(range(len(lengths)))
    for micro_batch in (m for micro_batches in plan for m in micro_batches):
        assert len(micro_batch) <= 1 or sum(lengths[row] for row in micro_batch) <= limit


def test_ranks_do_similar_work_at_the_same_time():
    assert plan_micro_batches([8, 1, 8, 1], num_ranks=2, max_tokens=8) == [[[0], [1]], [[2], [3]]]
    assert plan_micro_batches([9, 8, 7, 6, 5, 4], num_ranks=2, max_tokens=99) == [[[0, 3, 4]], [[1, 2, 5]]]


def test_long_rows_count_for_their_attention_too():
    assert plan_micro_batches([6, 3, 3, 3], num_ranks=2, max_tokens=99) == [[[0, 3]], [[1, 2]]]
    assert plan_micro_batches([6, 3, 3, 3], num_ranks=2, max_tokens=99, quadratic=1) == [[[0]], [[1, 2, 3]]]


def efficiency(lengths: np.ndarray, ranks: int, max_tokens: int, quadratic: float) -> float:
    """Return the share of the time in which ranks work, if all wait for the slowest at each micro-batch."""
    plan = plan_micro_batches(lengths.tolist(), ranks, max_tokens, quadratic)
    costs = np.asarray([[sum(lengths[r] + quadratic * lengths[r] ** 2 for r in m) for m in own] for own in plan])
    return costs.sum() / (ranks * costs.max(axis=0).sum())


@pytest.mark.parametrize("ranks", [1, 4, 8])
@pytest.mark.parametrize("max_tokens", [4096, 16384])
@pytest.mark.parametrize("prompts", [32, 128])
def test_ranks_wait_little_for_each_other_with_lengths_like_those_of_gsm8k(ranks, max_tokens, prompts):
    """Eight completions of each prompt. Prompts have 77 tokens on average, completions 130 with a long tail."""
    rng = np.random.default_rng(ranks + prompts)
    prompt = np.repeat(rng.lognormal(4.26, 0.4, prompts), 8)
    lengths = (prompt + np.minimum(rng.lognormal(4.7, 0.55, len(prompt)), 1024)).astype(int)
    assert efficiency(lengths, ranks, max_tokens, 1e-4) >= 0.97


def test_a_micro_batch_is_packed_for_the_model_and_padded_for_the_loss():
    batch = {
        "input_ids": np.array([[1, 2, 3, 0], [4, 0, 0, 0], [5, 6, 0, 0]]),
        "mask": np.array([[0, 1, 1, 0], [1, 0, 0, 0], [0, 1, 0, 0]], np.float32),
        "lengths": np.array([3, 1, 2]),
    }
    micro_batch = take_rows(batch, [2, 1], "cpu")
    assert micro_batch.input_ids.tolist() == [[5, 6, 4]]
    assert micro_batch.packing.lengths == (2, 1) and micro_batch.rows == [2, 1]
    assert micro_batch["mask"].tolist() == [[0, 1], [1, 0]]
    assert "mask" in micro_batch and "input_ids" not in micro_batch


def test_an_empty_micro_batch_takes_part_and_contributes_nothing():
    batch = {"input_ids": np.array([[1, 2]]), "mask": np.ones((1, 2), np.float32), "lengths": np.array([2])}
    micro_batch = take_rows(batch, [], "cpu")
    assert micro_batch.input_ids.tolist() == [[1, 2]] and micro_batch.rows == []
    assert micro_batch["mask"].tolist() == [[0, 0]]
