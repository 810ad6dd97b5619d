"""Rewards that name what they want, that judge groups, that are async, and that consist of several."""

from __future__ import annotations

import re

import pytest

from tests.support.rewards import HOME, attempts, full, judge, reward_pool
from trainer.config import RewardConfig
from trainer.rewards.scoring import reward_functions


def judged(name: str | list[str], *completions: str, n: int = 1, **settings):
    with reward_pool(full(name) if isinstance(name, str) else list(map(full, name)), **settings) as pool:
        return judge(pool, attempts(*completions), n)


def test_a_reward_gets_all_that_it_names():
    scores = judged("everything", "x", "cut")
    assert scores.terms == [
        {"answer": 5.0, "row": 3.0, "status": 0.0},
        {"answer": 5.0, "row": 3.0, "status": 1.0},
    ]
    assert scores.rewards == [8.0, 9.0] and scores.failures.count == 0


def test_a_plain_number_is_called_like_its_function():
    assert judged("length", "abc").terms == [{"length": 3.0}]
    assert judged("arithmetic", "5").terms == [{"arithmetic": 1.0}]


def test_several_rewards_are_weighed_and_added():
    scores = judged(["length", "parts", "arithmetic"], "5", "1234", weights=[0.5, 2.0, 1.0])
    assert scores.terms == [
        {"length": 1.0, "right": 1.0, "short": 1.0, "arithmetic": 1.0},
        {"length": 4.0, "right": 0.0, "short": 0.0, "arithmetic": 0.0},
    ]
    assert scores.rewards == [0.5 + 4.0 + 1.0, 2.0]


def test_a_term_that_fails_counts_as_0_and_the_others_as_they_are():
    scores = judged(["length", "broken"], "abc", "de")
    assert scores.rewards == [3.0, 2.0] and scores.terms == [{"length": 3.0}, {"length": 2.0}]
    assert scores.failures.count == 2
    assert re.fullmatch(r"broken: raised RuntimeError: no such model in \w+\.py:\d+", scores.failures.first)


def test_a_group_is_scored_in_one_call():
    scores = judged("rank", "aaa", "b", "cc", "d", "eeee", "ff", n=3)
    assert scores.rewards == [2.0, 0.0, 1.0, 0.0, 2.0, 1.0]


@pytest.mark.parametrize(
    "first, reason",
    [
        ("short list", "returned 1 rewards for 2 completions"),
        ("number", "returned float, which is not a list of rewards"),
        ("raise", r"raised KeyError: 'raise' in \w+\.py:\d+"),
    ],
)
def test_a_group_whose_call_fails_has_failed_as_a_whole(first, reason):
    scores = judged("odd_group", first, "x", n=2)
    assert (scores.rewards, scores.failures.count) == ([0.0, 0.0], 2)
    assert re.fullmatch(reason, scores.failures.first)


def test_one_bad_reward_of_a_group_costs_one_completion():
    scores = judged("odd_group", "one bad", "x", n=2)
    assert (scores.rewards, scores.failures.count) == ([1.0, 0.0], 1)


def test_async_calls_run_at_the_same_time():
    assert judged("meeting", *[f"meet {i}" for i in range(8)], concurrency=8).rewards == [2.0] * 8
    assert judged("async_group", "a", "bb", n=2).terms == [{"letters": 1.0}, {"letters": 2.0}]


def test_a_bad_async_call_costs_one_completion():
    for name, reason in [
        ("raise", "raised KeyError: 'late'"),
        ("hang", "took longer than reward.timeout_s=3"),
        ("block", "took longer than reward.timeout_s=3"),
        ("die", "ended its process (exit status 3)"),
    ]:
        scores = judged("meeting", "a", name, "b", timeout_s=3)
        assert scores.rewards == [1.0, 0.0, 1.0]
        assert scores.failures.count == 1 and scores.failures.first.startswith(reason)


def test_terms_must_have_names_and_be_numbers():
    for completion, reason in [
        ("empty", "returned 0 terms; a reward has 1 to 64"),
        ("many", "returned 100 terms"),
        ("name", "returned a term called 'a b'; names are letters, digits, _, . and -"),
        ("text", "term a is a str, which is not a number"),
        ("nan", "term a is nan"),
    ]:
        scores = judged("odd_parts", completion)
        assert scores.rewards == [0.0] and scores.failures.first.startswith(reason)


def test_functions_of_the_same_name_are_told_apart():
    some = reward_functions(RewardConfig(name=[f"{HOME}:length", "math", "operator:eq"]))
    assert [component.label for component in some] == ["length", "math", "eq"]
    both = reward_functions(RewardConfig(name=["operator:eq", "_operator:eq"]))
    assert [component.label for component in both] == ["operator.eq", "_operator.eq"]
