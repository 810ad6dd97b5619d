"""Boundaries of sequences in a packed row."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.parallel.collectives import AxisGroup
from trainer.parallel.packing import Packing, index_select

LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=30)


@settings(deadline=None)
@given(lengths=LENGTHS)
def test_positions_and_boundaries_restart_with_each_sequence(lengths):
    packing = Packing(lengths, "cpu")
    assert packing.position_ids.tolist() == [[p for length in lengths for p in range(length)]]
    assert packing.cu_seqlens.tolist() == [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    assert packing.cu_seqlens.dtype == torch.int32
    assert (packing.tokens, packing.longest) == (sum(lengths), max(lengths))


@settings(deadline=None)
@given(lengths=LENGTHS)
def test_rows_of_previous_indices_move_values_to_the_next_token_of_the_sequence(lengths):
    packing = Packing(lengths, "cpu")
    values = torch.arange(1.0, packing.tokens + 1)[None]
    rows = packing.rows_of(values, packing.previous_indices)
    expected = np.zeros((len(lengths), max(lengths)))
    for row, length in enumerate(lengths):
        start = sum(lengths[:row])
        expected[row, 1:length] = np.arange(start + 1, start + length)
    assert rows.tolist() == expected.tolist()
    previous = packing.previous_indices[packing.has_previous]
    assert rows[packing.has_previous].tolist() == values[0, previous].tolist()
    assert rows[~packing.has_previous].eq(0).all()


@settings(deadline=None)
@given(lengths=LENGTHS, is_sorted=st.booleans())
def test_the_cost_of_attention_is_the_sum_of_squared_lengths(lengths, is_sorted):
    lengths = sorted(lengths, reverse=True) if is_sorted else lengths
    packing = Packing(lengths, "cpu")
    assert [length for bucket in packing.buckets for length in bucket.lengths] == lengths
    for bucket, (indices, of_keys) in zip(packing.buckets, packing.bucket_indices, strict=True):
        assert bucket.keys == bucket.tokens and torch.equal(indices, of_keys)
        assert bucket.longest <= 64 or min(bucket.lengths) >= 0.75 * bucket.longest
        grid = torch.zeros(len(bucket.lengths) * bucket.longest)
        grid[indices] = 1
        assert grid.view(len(bucket.lengths), -1).sum(1).tolist() == list(bucket.lengths)


@settings(deadline=None)
@given(lengths=LENGTHS, ranks=st.integers(1, 8))
def test_each_context_rank_has_a_slice_of_the_row(lengths, ranks):
    peers = [AxisGroup(None, rank, ranks) for rank in range(ranks)]  # type: ignore[arg-type]
    row = torch.arange(1, sum(lengths) + 1)[None]
    parts = [Packing(lengths, "cpu", context).shard(row) for context in peers]
    assert len({part.shape for part in parts}) == 1
    together = torch.cat(parts, dim=1)
    assert torch.equal(together[:, : row.shape[1]], row)
    assert together[:, row.shape[1] :].sum() == 0 and together.shape[1] - row.shape[1] < ranks


def test_gradients_of_repeated_rows_are_the_same_each_time_with_two_threads():
    rows = torch.randn(64, 256, generator=torch.Generator().manual_seed(1), requires_grad=True)
    indices = torch.arange(1024) % 48
    weights = torch.randn(1024, 256, generator=torch.Generator().manual_seed(2))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = [torch.autograd.grad((index_select(rows, indices) * weights).sum(), rows)[0] for _ in range(20)]
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(gradient, found[0]) for gradient in found)
    expected = torch.zeros(64, 256).index_add(0, indices, weights)
    torch.testing.assert_close(found[0], expected)


def test_gradients_of_repeated_rows_are_rounded_once():
    rows = torch.ones(1, 8, dtype=torch.bfloat16, requires_grad=True)
    weights = torch.rand(300, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    (index_select(rows, torch.zeros(300, dtype=torch.long)) * weights).sum().backward()
    assert torch.equal(rows.grad[0], weights.float().sum(0).bfloat16())
