"""The split of a batch over ranks and micro-batches."""

from __future__ import annotations

import numpy as np

from trainer.parallel.batching import plan_micro_batches, take_rows


def test_plan_contains_every_row_once_and_as_many_micro_batches_for_each_rank():
    rng = np.random.default_rng(1)
    for _ in range(200):
        lengths = rng.integers(1, 100, rng.integers(1, 60)).tolist()
        ranks, limit = int(rng.integers(1, 6)), int(rng.integers(20, 900))
        plan = plan_micro_batches(lengths, ranks, limit)
        assert len(plan) == ranks and len({len(micro_batches) for micro_batches in plan}) == 1
        rows = [row for micro_batches in plan for rows in micro_batches for row in rows]
        assert sorted(rows) == list(range(len(lengths)))
        for micro_batch in (m for micro_batches in plan for m in micro_batches):
            assert len(micro_batch) <= 1 or sum(lengths[row] for row in micro_batch) <= limit


def test_plan_spreads_the_long_rows_over_the_ranks():
    assert plan_micro_batches([8, 1, 8, 1], num_ranks=2, max_tokens=8) == [[[0], [1]], [[2], [3]]]


def test_a_split_group_gives_both_ranks_equal_work():
    assert plan_micro_batches([9, 8, 7, 6, 5, 4], num_ranks=2, max_tokens=99) == [[[0, 2, 4]], [[1, 3, 5]]]


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
