"""Rewards are tried before anything expensive starts: one that always fails would train on zeros."""

from __future__ import annotations

import pytest

from tests.support.rewards import HOME, attempts, full
from trainer.config import RewardConfig
from trainer.errors import UserError
from trainer.rewards.scorer import RewardInput
from trainer.sources.trials import try_rewards


def tried(name: str | list[str], *completions: str, **settings) -> None:
    names = full(name) if isinstance(name, str) else list(map(full, name))
    try_rewards(RewardConfig(name=names, **settings), attempts(*completions), n=2)


def test_a_reward_that_fails_for_all_rows_is_refused():
    with pytest.raises(UserError, match=f"reward.name={HOME}:broken: fails for the first 3 rows") as refusal:
        tried(["length", "broken"], "1", "2", "3")
    assert "raised RuntimeError: no such model" in str(refusal.value)
    tried("odd_group", "one bad", "x")


def test_two_rewards_with_the_same_term_are_refused():
    with pytest.raises(UserError, match="clashing: returned a term length, as another reward does"):
        tried(["length", "clashing"], "1")


def test_a_slow_reward_is_no_reason_not_to_start(caplog):
    tried("meeting", "hang", timeout_s=0.5)
    assert "took longer than reward.timeout_s=0.5" in caplog.text


def test_with_no_limit_of_failures_the_preflight_warns(caplog):
    tried("broken", "1", max_error_rate=1.0)
    assert "fails for the first 1 rows of the data" in caplog.text


def tried_with_answers(*names: str, **settings) -> None:
    answers = [RewardInput(answer, answer) for answer in ("1234", "x", "2345")]
    try_rewards(RewardConfig(name=[full(name) for name in names], **settings), answers, n=2)


def test_a_threshold_that_all_right_answers_exceed_is_named_in_a_warning(caplog):
    tried_with_answers("length", weights=[2.0])  # of 4, 1 and 4 characters
    assert caplog.messages == [
        "reward.success_threshold=1: each of the first 3 reference answers gets 2 or more, so val/accuracy counts "
        "worse answers as right, too; set it to what a right answer gets"
    ]
    tried_with_answers("length", weights=[2.0], success_threshold=2.0)
    tried_with_answers("length")
    assert len(caplog.records) == 1


def test_a_reward_that_gives_right_answers_nothing_is_named_in_a_warning(caplog):
    tried_with_answers("stern", "arithmetic", "formatted", "length", success_threshold=4.0)
    tried_with_answers("arithmetic", "stern", weights=[1.0, -0.5], success_threshold=4.0)
    for name, value in (("stern", -1), ("formatted", 0)):
        assert caplog.text.count(f"reward.name={HOME}:{name}: gives {value} to each of the first 3 reference") == 1
    assert len(caplog.records) == 2
