"""Numbers that are keyed by names."""

from __future__ import annotations

from trainer.seeding import derive_seed, environment_seed, request_seed


def test_a_key_depends_on_every_part_and_never_changes():
    base = (1, "completion", 1, "a", 0)
    others = [
        (2, "completion", 1, "a", 0),
        (1, "completion", 2, "a", 0),
        (1, "completion", 1, "b", 0),
        (1, "completion", 1, "a", 1),
        (1, "completion", 1, "a", "0"),
    ]
    keys = [derive_seed(*parts) for parts in [base, *others]]
    assert len(set(keys)) == 6
    assert all(0 <= number < 2**63 for number in keys)
    assert keys[0] == 2064020276072868472, "a resumed run would sample something else"


def test_the_first_turn_of_an_episode_draws_what_a_single_turn_draws():
    assert request_seed(1, 1, "a", 0) == request_seed(1, 1, "a", 0, turn=0) == derive_seed(1, "completion", 1, "a", 0)
    seeds = [request_seed(1, 1, "a", j, turn) for j in range(3) for turn in range(3)]
    assert len({*seeds, environment_seed(1, "a"), environment_seed(1, "b"), environment_seed(2, "a")}) == 12
