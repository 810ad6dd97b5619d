"""What each section of the config refuses, and what it just accepts. A test file imports both tests, and lists cases.

`CONTRADICTIONS` are pairs of overrides and of what the sentence about them matches. `AT_THE_BOUND` are overrides that
would contradict each other one step further, or whose contradiction has no effect.
"""

from __future__ import annotations

import re

from tests.support.config import config_of, refusal_of


def test_contradictions_are_refused_in_one_sentence(contradiction):
    overrides, sentence = contradiction
    assert re.search(sentence, refusal_of(overrides)), refusal_of(overrides)


def test_what_is_at_a_bound_is_accepted(at_the_bound):
    config_of(at_the_bound)
