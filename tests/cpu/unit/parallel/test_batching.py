"""Batches as arrays, micro-batches as tensors."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.parallel.batching import count_shared_tokens, take_rows


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


def test_an_empty_micro_batch_contributes_nothing():
    batch = {"input_ids": np.array([[1, 2]]), "mask": np.ones((1, 2), np.float32), "lengths": np.array([2])}
    micro_batch = take_rows(batch, [], "cpu")
    assert micro_batch.input_ids.tolist() == [[1, 2]] and micro_batch.rows == []
    assert micro_batch["mask"].tolist() == [[0, 0]]


BATCH = {
    "input_ids": np.array([[1, 2, 3, 4], [9, 9, 0, 0], [1, 2, 5, 0], [1, 2, 3, 0], [9, 9, 9, 0]]),
    "mask": np.array([[0, 0, 1, 1], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 0], [0, 1, 1, 0]], np.float32),
    "lengths": np.array([4, 2, 3, 3, 3]),
    "group_ids": np.array([7, 3, 7, 7, 3]),
}


def test_tokens_with_which_all_rows_of_a_group_begin_are_shared_but_for_one_of_each_row():
    assert count_shared_tokens(BATCH).tolist() == [2, 1, 2, 2, 1]
    alone = {name: array[:2] for name, array in BATCH.items()}
    assert count_shared_tokens(alone).tolist() == [0, 0]


def test_neighbours_of_one_group_have_their_shared_tokens_once():
    shared = count_shared_tokens(BATCH)
    micro_batch = take_rows(BATCH, [2, 0, 4, 3], "cpu", shared=shared)
    assert micro_batch.input_ids.tolist() == [[1, 2, 5, 3, 4, 9, 9, 9, 1, 2, 3]]
    assert micro_batch.packing.lengths == (3, 4, 3, 3) and micro_batch.packing.prefix_lengths == (0, 2, 0, 0)
    assert micro_batch["mask"].tolist() == [[0, 0, 1, 0], [0, 0, 1, 1], [0, 1, 1, 0], [0, 0, 1, 0]]
    empty = take_rows(BATCH, [], "cpu", shared=shared)
    assert empty.packing.prefix_lengths == (0,) and not empty["mask"].any()


@settings(deadline=None)
@given(st.data())
def test_each_row_can_be_read_from_a_row_in_which_tokens_are_shared(data):
    count = data.draw(st.integers(1, 9))
    groups = data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    rows = [data.draw(st.lists(st.integers(1, 2), min_size=1, max_size=6)) for _ in range(count)]
    batch = {
        "input_ids": np.array([row + [0] * (6 - len(row)) for row in rows]),
        "lengths": np.array([len(row) for row in rows]),
        "group_ids": np.array(groups),
    }
    order = sorted(range(count), key=lambda row: groups[row])
    micro_batch = take_rows(batch, order, "cpu", shared=count_shared_tokens(batch))
    packing, tokens = micro_batch.packing, micro_batch.input_ids[0].tolist() + [0]
    assert packing.tokens == len(tokens) - 1 == sum(packing.suffix_lengths)
    for index, row in enumerate(order):
        assert [tokens[i] for i in packing.token_indices[index]] == (rows[row] + [0] * 6)[: packing.longest]
        assert [tokens[i] for i in packing.previous_indices[index]] == ([0, *rows[row][:-1]] + [0] * 6)[
            : packing.longest
        ]
        positions = packing.position_ids[0][packing.token_indices[index][: len(rows[row])]]
        assert positions.tolist() == list(range(len(rows[row])))
    assert packing.key_indices.tolist() == [i for i in packing.token_indices.flatten().tolist() if i < packing.tokens]
    assert packing.cu_seqlens_k.diff().tolist() == list(packing.lengths)
    assert packing.cu_seqlens.diff().tolist() == list(packing.suffix_lengths)
    assert [length for bucket in packing.buckets for length in bucket.lengths] == list(packing.suffix_lengths)
