"""When validation is due."""

from __future__ import annotations

from trainer.config.validation import is_due


def test_validation_is_due_at_the_start_at_multiples_and_at_the_end():
    assert [step for step in range(8) if is_due(3, step, 7)] == [0, 3, 6, 7]
    assert not any(is_due(-1, step, 7) for step in range(8))
