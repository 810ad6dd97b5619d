"""The split of a batch over ranks and micro-batches."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.tables import table
from trainer.parallel.load_balancing import Plan, Rows, plan_micro_batches, plan_time


def num_tokens(rows: Rows, batch: list[int]) -> int:
    """Return how many tokens a micro-batch counts as."""
    chosen = np.asarray(batch)
    groups = chosen if rows.groups is None else rows.groups[chosen]
    return int(rows.num_tokens_of([chosen[groups == group] for group in np.unique(groups)]).sum())


@settings(deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 100), st.integers(0, 5)), min_size=1, max_size=60),
    shared=st.lists(st.integers(0, 99), min_size=6, max_size=6),
    ranks=st.integers(1, 6),
    limit=st.integers(1, 900),
    quadratic=st.sampled_from([0.0, 0.01]),
)
def test_plan_contains_every_row_once_and_as_many_micro_batches_for_each_rank(sizes, shared, ranks, limit, quadratic):
    lengths, groups = np.array(sizes).T
    common = np.array([min(shared[g], lengths[groups == g].min() - 1) for g in groups])
    common[[(groups == g).sum() == 1 for g in groups]] = 0
    sharing, alone = Rows(lengths, quadratic, groups, common), Rows(lengths, quadratic)
    plans = [plan_micro_batches(rows, ranks, limit) for rows in (sharing, alone)]
    assert plan_time(sharing, plans[0]) <= plan_time(alone, plans[1])
    for rows, plan in zip((sharing, alone), plans, strict=True):
        assert len(plan) == ranks and len({len(micro_batches) for micro_batches in plan}) == 1
        chosen = [row for micro_batches in plan for batch in micro_batches for row in batch]
        assert sorted(chosen) == list(range(len(lengths)))
        for batch in (batch for micro_batches in plan for batch in micro_batches):
            assert len(batch) <= 1 or num_tokens(rows, batch) <= limit


@settings(deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 100), st.integers(0, 9)), min_size=1, max_size=60),
    shared=st.none() | st.integers(0, 20),
    ranks=st.integers(1, 6),
    limit=st.integers(1, 400),
)
def test_kept_groups_are_never_divided(sizes, shared, ranks, limit):
    """A group that exceeds the limit goes alone."""
    lengths, groups = np.array(sizes).T
    common = None if shared is None else np.minimum(shared, [lengths[groups == g].min() - 1 for g in groups])
    rows = Rows(lengths, 0.01, groups, common, keeps_groups=True)
    plan = plan_micro_batches(rows, ranks, limit)
    assert len(plan) == ranks and len({len(micro_batches) for micro_batches in plan}) == 1
    batches = [batch for micro_batches in plan for batch in micro_batches]
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    holders = [set(groups[batch].tolist()) for batch in batches]
    assert sum(map(len, holders)) == len(set(groups.tolist())), "each group is in one micro-batch"
    assert all(len(held) <= 1 or num_tokens(rows, batch) <= limit for held, batch in zip(holders, batches, strict=True))


@table("ranks, limit", [(1, 100), (2, 100), (2, 1000), (3, 120)])
def test_pairs_of_unequal_lengths_are_parted_unless_groups_are_kept(ranks, limit):
    """So a loss over pairs that is right with these rows is not right by luck."""
    lengths, groups = np.array([90, 80, 70, 60, 50, 6, 5, 4, 3, 2]), np.array([0, 1, 2, 3, 4, 0, 1, 2, 3, 4])

    def whole_pairs(keeps_groups: bool) -> int:
        plan = plan_micro_batches(Rows(lengths, 0.0, groups, keeps_groups=keeps_groups), ranks, limit)
        return sum((groups[batch] == g).sum() == 2 for batches in plan for batch in batches for g in range(5))

    assert whole_pairs(True) == 5
    assert whole_pairs(False) < 3


def plan_of(lengths: list[int], max_tokens: int, quadratic: float = 0.0) -> Plan:
    """A plan of two ranks."""
    return plan_micro_batches(Rows(np.array(lengths), quadratic), 2, max_tokens)


def test_ranks_do_similar_work_at_the_same_time():
    assert plan_of([8, 1, 8, 1], 8) == [[[0], [1]], [[2], [3]]]
    assert plan_of([9, 8, 7, 6, 5, 4], 99) == [[[0, 3, 4]], [[1, 2, 5]]]


def test_long_rows_count_for_their_attention_too():
    assert plan_of([6, 3, 3, 3], 99) == [[[0, 3]], [[1, 2]]]
    assert plan_of([6, 3, 3, 3], 99, quadratic=1) == [[[0]], [[1, 2, 3]]]


def shared_by_all(lengths: list[int], groups: list[int], shared: int) -> Rows:
    return Rows(np.array(lengths), 0.0, np.array(groups), np.full(len(lengths), shared))


def test_rows_that_share_tokens_stay_together_and_follow_one_another():
    rows = shared_by_all([9, 9, 8, 8, 7, 7], [0, 1, 0, 1, 0, 1], 5)
    assert plan_micro_batches(rows, 2, 99) == [[[0, 2, 4]], [[1, 3, 5]]]
    assert plan_micro_batches(rows, 1, 99) == [[[0, 2, 4, 1, 3, 5]]]


def test_a_family_is_divided_where_balance_gains_more_than_it_costs():
    assert plan_micro_batches(shared_by_all([30, 30, 30, 30], [0, 0, 0, 0], 10), 2, 99) == [[[0, 2]], [[1, 3]]]
    assert plan_micro_batches(shared_by_all([30, 30, 30, 30], [0, 0, 0, 0], 29), 2, 99) == [[[0, 2]], [[1, 3]]]
    alone = shared_by_all([30, 30, 30, 30], [0, 0, 1, 1], 29)
    assert plan_micro_batches(alone, 2, 99) == [[[0, 1]], [[2, 3]]]


def test_a_family_is_divided_where_a_micro_batch_has_no_room_for_it():
    rows = shared_by_all([30, 30, 30, 30], [0, 0, 0, 0], 10)
    assert [len(batch) for batch in plan_micro_batches(rows, 1, 50)[0]] == [2, 2]
    assert [len(batch) for batch in plan_micro_batches(rows, 1, 30)[0]] == [1, 1, 1, 1]
    many = shared_by_all([30] * 16, [0] * 16, 29)  # 45 tokens, but the attention copies the keys of 480
    assert [len(batch) for batch in plan_micro_batches(many, 1, 60)[0]] == [8, 8]


def test_a_family_that_needs_several_micro_batches_is_divided_among_all_ranks():
    rows = shared_by_all([238] * 16, [0] * 16, 13)
    plan = plan_micro_batches(rows, 8, 2048)
    assert [[len(batch) for batch in batches] for batches in plan] == [[2]] * 8


def lengths_like_gsm8k(prompts: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lengths, groups and prompt lengths of eight completions of each prompt.

    Prompts have 77 tokens on average, completions 130 with a long tail.
    """
    rng = np.random.default_rng(seed)
    prompt = np.repeat(rng.lognormal(4.26, 0.4, prompts), 8)
    lengths = (prompt + np.minimum(rng.lognormal(4.7, 0.55, len(prompt)), 1024)).astype(int)
    return lengths, np.repeat(np.arange(prompts), 8), prompt.astype(int)


def times(rows: Rows, ranks: int, max_tokens: int) -> tuple[float, float]:
    """Return the time that all ranks work, and the time that it takes if all wait for the slowest."""
    costs = np.array([[rows.cost(batch) for batch in own] for own in plan_micro_batches(rows, ranks, max_tokens)])
    return costs.sum(), ranks * costs.max(axis=0).sum()


@table("ranks", [1, 4, 8])
@table("max_tokens", [4096, 16384])
@table("prompts", [32, 128])
def test_ranks_wait_little_for_each_other_with_lengths_like_those_of_gsm8k(ranks, max_tokens, prompts):
    lengths, groups, shared = lengths_like_gsm8k(prompts, ranks + prompts)
    work, time = times(Rows(lengths, 1e-4), ranks, max_tokens)
    assert work / time >= 0.97
    rows = Rows(lengths, 1e-4, groups, shared)
    least = rows.cost(np.arange(len(lengths)))  # each prompt once
    time_of_shared = times(rows, ranks, max_tokens)[1]
    assert least / time_of_shared >= 0.93
    assert time / time_of_shared >= 1.35
