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
    limit = f"rollout.max_{name}_tokens=100"
    assert config_of([limit, f"plan.{name}_tokens=100"])
    with pytest.raises(UserError, match=f"plan.{name}_tokens=101: is above the longest, {limit}"):
        config_of([limit, f"plan.{name}_tokens=101"])


def test_a_job_reads_no_key_of_plans():
    assert not config_of([]).reads("plan.gpus")
