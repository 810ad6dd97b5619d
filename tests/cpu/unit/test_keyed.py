"""Numbers that are keyed by names."""

from __future__ import annotations

from trainer.keyed import key


def test_a_key_depends_on_every_part_and_never_changes():
    base = (1, "completion", 1, "a", 0)
    others = [
        (2, "completion", 1, "a", 0),
        (1, "completion", 2, "a", 0),
        (1, "completion", 1, "b", 0),
        (1, "completion", 1, "a", 1),
        (1, "completion", 1, "a", "0"),
    ]
    keys = [key(*parts) for parts in [base, *others]]
    assert len(set(keys)) == 6
    assert all(0 <= number < 2**63 for number in keys)
    assert keys[0] == 2064020276072868472, "a resumed run would sample something else"
