"""Which groups a step has taken, as a file."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.ledger import SampleIndex
from trainer.journal.taken import TakenGroup, TakenGroups

counts = st.integers(0, 2**63 - 1)
groups = st.builds(
    TakenGroup,
    st.builds(SampleIndex, counts, counts, counts),
    st.dictionaries(st.text(), st.tuples(counts, st.text()), max_size=2),
)


@given(st.builds(TakenGroups, st.text(), st.text(), st.lists(groups, max_size=4)))
def test_a_file_says_what_was_taken(taken):
    assert TakenGroups.decode(taken.encode()) == taken


@pytest.mark.parametrize(
    ("old", "new"), [('"row"', '"wor"'), ('"version": 1', '"version": -1'), ("}", ""), ('"k"', "1")]
)
def test_a_damaged_file_is_refused(old, new):
    data = TakenGroups("h", "c", [TakenGroup(SampleIndex(0, 1, 2), {"k": (1, "h")})]).encode().decode()
    assert json.loads(data) and re.search(old, data)
    with pytest.raises(ValueError):
        TakenGroups.decode(data.replace(old, new))
