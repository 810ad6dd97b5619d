"""The built-in environment: when an episode ends, and what an answer earns. `test_episode_runner.py` plays it."""

from __future__ import annotations

import pytest

from tests.support.retry import RetryEnv


def play(environment: RetryEnv, row: dict, *replies: str) -> list:
    assert environment.reset(row, seed=0) == [{"role": "user", "content": row[environment._keys[0]]}]
    return [environment.step({"role": "assistant", "content": text}) for text in replies]


def test_progress_is_paid_once():
    """An answer that is as good as an earlier one earns nothing, whatever came between."""
    environment = RetryEnv(tries=4)
    environment.reset({"prompt": "abc", "answer": "cba"}, seed=0)
    steps = [environment.step({"role": "assistant", "content": text}) for text in ("cb", "", "cb", "cba")]
    assert [step.reward for step in steps] == pytest.approx([0.8, 0.0, 0.0, 0.2])
    assert [step.done for step in steps] == [False, False, False, True]


def test_a_right_answer_ends_the_episode_and_blanks_around_it_do_not_matter():
    first, second = play(RetryEnv(tries=9, again="no"), {"prompt": "abc", "answer": "cba"}, "xyz", " cba\n")
    assert (first.done, first.reward, list(first.messages)) == (False, 0.0, [{"role": "user", "content": "no"}])
    assert (second.done, second.reward, list(second.messages)) == (True, 1.0, [])


def test_the_last_try_ends_the_episode():
    steps = play(RetryEnv(tries=2), {"prompt": "abc", "answer": "cba"}, "x", "y")
    assert [step.done for step in steps] == [False, True]


def test_columns_can_have_other_names_and_numbers_are_text():
    (step,) = play(RetryEnv(prompt_key="q", answer_key="a"), {"q": "2 + 2", "a": 4}, "4")
    assert step.done and step.reward == 1.0
