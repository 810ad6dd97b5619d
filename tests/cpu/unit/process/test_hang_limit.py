"""When something that has been quick before hangs."""

from __future__ import annotations

import pytest

from trainer.process.hang_limit import learnt_limit_s


@pytest.mark.parametrize(("longest", "limit"), [(0.0, 60.0), (5.0, 60.0), (7.0, 70.0)])
def test_what_was_quick_hangs_after_the_timeout_and_what_was_slow_after_ten_times_as_long(longest, limit):
    assert learnt_limit_s(60.0, longest) == limit
