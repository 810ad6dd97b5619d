"""Boundaries of sequences in a packed row."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.parallel.collectives import Peers
from trainer.parallel.packing import Packing

LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=30)


@settings(deadline=None)
@given(lengths=LENGTHS)
def test_positions_and_boundaries_restart_with_each_sequence(lengths):
    packing = Packing(lengths, "cpu")
    assert packing.position_ids.tolist() == [[p for length in lengths for p in range(length)]]
    assert packing.boundaries.tolist() == [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    assert packing.boundaries.dtype == torch.int32
    assert (packing.tokens, packing.longest) == (sum(lengths), max(lengths))


@settings(deadline=None)
@given(lengths=LENGTHS)
def test_values_move_to_the_next_token_and_stay_in_their_sequence(lengths):
    packing = Packing(lengths, "cpu")
    values = torch.arange(1.0, packing.tokens + 1)[None]
    rows = packing.rows_of_next(values)
    expected = np.zeros((len(lengths), max(lengths)))
    for row, length in enumerate(lengths):
        start = sum(lengths[:row])
        expected[row, 1:length] = np.arange(start + 1, start + length)
    assert rows.tolist() == expected.tolist()
    previous = packing.previous_places[packing.has_previous]
    assert rows[packing.has_previous].tolist() == values[0, previous].tolist()
    assert rows[~packing.has_previous].eq(0).all()


@settings(deadline=None)
@given(lengths=LENGTHS, is_sorted=st.booleans())
def test_attention_costs_the_sum_of_squares_and_not_the_square_of_the_sum(lengths, is_sorted):
    lengths = sorted(lengths, reverse=True) if is_sorted else lengths
    packing = Packing(lengths, "cpu")
    assert [length for bucket in packing.buckets for length in bucket.lengths] == lengths
    assert [bucket.first for bucket in packing.buckets] == [
        sum(b.tokens for b in packing.buckets[:i]) for i in range(len(packing.buckets))
    ]
    for bucket, places in zip(packing.buckets, packing.bucket_places, strict=True):
        assert bucket.longest <= 64 or min(bucket.lengths) >= 0.75 * bucket.longest
        grid = torch.zeros(len(bucket.lengths) * bucket.longest)
        grid[places] = 1
        assert grid.view(len(bucket.lengths), -1).sum(1).tolist() == list(bucket.lengths)


@settings(deadline=None)
@given(lengths=LENGTHS, ranks=st.integers(1, 8))
def test_each_rank_of_a_context_has_a_part_of_the_row(lengths, ranks):
    peers = [Peers(None, rank, ranks) for rank in range(ranks)]  # type: ignore[arg-type]
    row = torch.arange(1, sum(lengths) + 1)[None]
    parts = [Packing(lengths, "cpu", context).own(row) for context in peers]
    assert len({part.shape for part in parts}) == 1
    together = torch.cat(parts, dim=1)
    assert torch.equal(together[:, : row.shape[1]], row)
    assert together[:, row.shape[1] :].sum() == 0 and together.shape[1] - row.shape[1] < ranks
