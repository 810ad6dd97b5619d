"""Which groups of completions a step trains on."""

from __future__ import annotations

import numpy as np

from trainer.sources.sampling import choose_groups


def test_the_first_groups_that_teach_something_are_chosen():
    same, mixed = [1.0, 1.0], [0.0, 1.0]
    assert choose_groups(np.array([mixed, same, mixed, mixed]), 2, complete=False) == ([0, 2], 3)
    assert choose_groups(np.array([mixed, same, same]), 2, complete=False) is None
    assert choose_groups(np.array([same, same, mixed]), 2, complete=True) == ([0, 2], 3)
    assert choose_groups(np.array([same, same, same]), 2, complete=True) == ([0, 1], 3)


def test_a_failure_makes_no_group_worth_training_on():
    failed = np.nan
    mixed, hidden, alone, none = [0.0, 1.0, failed], [1.0, 1.0, failed], [1.0, failed, failed], [failed] * 3
    assert choose_groups(np.array([hidden, alone, none, mixed]), 1, complete=False) == ([3], 4)
    assert choose_groups(np.array([hidden, alone, none]), 1, complete=False) is None
    assert choose_groups(np.array([hidden, mixed]), 2, complete=True) == ([0, 1], 2)
