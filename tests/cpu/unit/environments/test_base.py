"""The protocol of environments, and that ours have it."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

from tests.support.retry import RetryEnv
from trainer.environments.base import Environment, StepResult
from trainer.environments.tools import ToolEnvironment

METHODS = [name for name, _ in inspect.getmembers(Environment, inspect.isfunction) if not name.startswith("_")]


@pytest.mark.parametrize("kind", [RetryEnv, ToolEnvironment])
def test_our_environments_have_the_methods_of_the_protocol_with_its_parameters(kind):
    assert METHODS == ["close", "reset", "step"]
    for method in METHODS:
        expected = inspect.signature(getattr(Environment, method)).parameters
        takes = [name for name in inspect.signature(getattr(kind, method)).parameters if name != "step_id"]
        assert takes == list(expected), method


def test_a_step_earns_nothing_and_goes_on_unless_it_says_otherwise():
    assert dataclasses.asdict(StepResult()) == {
        "messages": (),
        "reward": 0.0,
        "done": False,
        "rewards": {},
        "metrics": {},
        "player": "",
        "player_rewards": {},
    }


def test_steps_share_no_dict_and_cannot_be_changed():
    """The episode runner keeps them until the episode ends."""
    assert StepResult().rewards is not StepResult().rewards
    with pytest.raises(dataclasses.FrozenInstanceError):
        StepResult().reward = 1.0
