"""What each rank gets of a batch."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trainer.parallel.batching import Batch, count_shared_tokens
from trainer.parallel.load_balancing import Limits, Share, divide

LIMITS = st.builds(Limits, st.sampled_from([1, 8, 40, 1000]), st.sampled_from([0.0, 1e-3]), st.booleans())


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Groups whose rows begin with the same tokens."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=6))
    prompts = [draw(st.integers(1, 9)) for _ in sizes]
    lengths = np.asarray([p + draw(st.integers(1, 12)) for p, n in zip(prompts, sizes, strict=True) for _ in range(n)])
    groups = np.repeat(np.arange(len(sizes)), sizes)
    columns = np.arange(int(lengths.max()))
    in_prompt = columns < np.repeat(prompts, sizes)[:, None]
    rng = np.random.default_rng(len(lengths))
    ids = np.where(in_prompt, groups[:, None], rng.integers(10, 99, (len(lengths), len(columns))))
    has_token = columns < lengths[:, None]
    return {
        "input_ids": (ids * has_token).astype(np.int32),
        "mask": (has_token & ~in_prompt).astype(np.float32),
        "lengths": lengths,
        "group_ids": groups,
        "number": np.arange(len(lengths)),
    }


@given(batches(), LIMITS, st.integers(1, 7), st.integers(1, 3), st.booleans())
def test_the_shares_of_all_ranks_are_the_batch(batch, limits, ranks, parts, keeps_groups):
    of_parts = [rows for rows in np.array_split(np.arange(len(np.unique(batch["group_ids"]))), parts) if len(rows)]
    rows = [np.flatnonzero(np.isin(batch["group_ids"], groups)) for groups in of_parts]
    shares = divide(batch, rows, limits, ranks, keeps_groups)
    for number, of_part in enumerate(rows):
        found = [own_rows(share, number) for share in shares]
        assert sorted(row for own in found for row in own) == of_part.tolist(), "each row once, on one rank"
        assert {share.mini_batches[number].tokens for share in shares} == {batch["mask"][of_part].sum()}
        assert len({len(share.mini_batches[number].micro_batches) for share in shares}) == 1
        known = count_shared_tokens({name: array[of_part] for name, array in batch.items()})
        for share in shares:
            shared = share.mini_batches[number].shared
            expected = np.zeros(len(batch["lengths"]), np.int64)
            expected[of_part] = known if limits.shares_prompts else 0
            assert (np.zeros(len(share.rows)) if shared is None else shared).tolist() == expected[share.rows].tolist()
    for share in shares:
        assert share.batch["number"].tolist() == share.rows.tolist()
        width = int(batch["lengths"][share.rows].max())
        assert np.array_equal(share.batch["input_ids"], batch["input_ids"][share.rows, :width])
        own = {row for number in range(len(rows)) for row in own_rows(share, number)}
        assert set(share.rows.tolist()) == (own or {0}), "no row that it does not compute, but for a rank without any"


def own_rows(share: Share, number: int) -> list[int]:
    """The rows of the batch that a rank computes of a mini-batch."""
    return [int(share.rows[row]) for micro_batch in share.mini_batches[number].micro_batches for row in micro_batch]


FOUR_ROWS = {
    "input_ids": np.ones((4, 3), np.int32),
    "mask": np.ones((4, 3), np.float32),
    "lengths": np.full(4, 3),
    "group_ids": np.arange(4),
}


def test_rows_of_several_epochs_are_sent_once():
    (share,) = divide(FOUR_ROWS, [np.arange(4), np.array([2, 3]), np.array([0, 1])], Limits(100, 0.0, False), 1)
    assert share.rows.tolist() == [0, 1, 2, 3]
    assert [own_rows(share, number) for number in range(3)] == [[0, 1, 2, 3], [2, 3], [0, 1]]


def test_ranks_know_whether_a_mini_batch_has_its_old_logprobs():
    batch = {**FOUR_ROWS, "has_old_logprobs": np.array([True, True, False, False])}
    shares = divide(batch, [np.array([2, 3]), np.array([0, 1])], Limits(100, 0.0, False), 2)
    assert [[one.has_old_logprobs for one in share.mini_batches] for share in shares] == [[False, True]] * 2
