"""Keys of plans."""

from __future__ import annotations

import pytest

from tests.support.config import config_of
from trainer.errors import UserError


def test_a_plan_is_for_this_machine_by_default():
    plan = config_of([]).plan
    assert (plan.gpus, plan.prompt_tokens, plan.response_tokens) == ("cpu", None, None)


@pytest.mark.parametrize("name", ["prompt", "response"])
def test_a_mean_is_no_longer_than_the_longest(name):
    limits = ["rollout.max_prompt_tokens=60", "rollout.max_response_tokens=40"]
    assert config_of([*limits, f"plan.{name}_tokens=100"])
    assert config_of([*limits, "plan.prompt_tokens=60", "plan.response_tokens=40"])
    for words in ([f"plan.{name}_tokens=101"], ["plan.prompt_tokens=61", "plan.response_tokens=40"]):
        with pytest.raises(UserError, match="makes the mean sequence longer than the longest, which has 100 tokens"):
            config_of([*limits, *words])


def test_a_job_reads_no_key_of_plans():
    assert not config_of([]).reads("plan.gpus")
