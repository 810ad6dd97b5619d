"""The limits that user code meets: each is used, and they fit together."""

from __future__ import annotations

import re
from pathlib import Path

from trainer.sandbox import limits

NAMES = [name for name in vars(limits) if name.isupper()]


def test_every_limit_is_used():
    package = Path(limits.__file__).parents[1]
    texts = [path.read_text() for path in package.rglob("*.py") if path != Path(limits.__file__)]
    unused = [name for name in NAMES if not any(re.search(rf"\b{name}\b", text) for text in texts)]
    assert NAMES and not unused


def test_a_step_of_an_environment_fits_into_a_message():
    """Values that are allowed one by one must be allowed together."""
    from trainer.environments.worker import largest_message

    assert largest_message(0) >= 2 * limits.MAX_MESSAGE_EXTRAS
    assert limits.MAX_MESSAGES * len('{"role":"","content":""},') < limits.MAX_MESSAGE_EXTRAS


def test_the_reaper_has_time_to_end_what_a_call_may_leave():
    assert limits.DEATH_S < limits.STOP_S


def test_sums_of_squared_rewards_are_finite_in_float32():
    assert 1e9 * limits.LARGEST_REWARD**2 < 3.4e38
