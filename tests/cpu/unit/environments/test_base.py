"""The protocol of environments, and that ours have it."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

from tests.support.retry import RetryEnv
from trainer.environments.base import Environment, StepResult, find_environment, problem_of_state
from trainer.environments.tools import ToolEnvironment
from trainer.errors import UserError

METHODS = [name for name, _ in inspect.getmembers(Environment, inspect.isfunction) if not name.startswith("_")]


@pytest.mark.parametrize("kind", [RetryEnv, ToolEnvironment])
def test_our_environments_have_the_methods_of_the_protocol_with_its_parameters(kind):
    assert METHODS == ["close", "reset", "step"]
    for method in METHODS:
        expected = inspect.signature(getattr(Environment, method)).parameters
        takes = [*inspect.signature(getattr(kind, method)).parameters]
        assert [name for name in takes if name not in ("step_id", "recorded")] == list(expected), method


class SavesToFiles(RetryEnv):
    def save(self, path: str = "game.json") -> None: ...

    def load(self, path: str) -> None: ...


class LoadsRows(RetryEnv):
    def load(self, state: bytes) -> None: ...


class HasAFlag(RetryEnv):
    save = True


def test_methods_called_save_and_load_for_another_purpose_are_refused_at_the_start():
    wanted = r"an environment that saves its state has save\(self\) -> bytes and load\(self, state: bytes\)"
    for name, problem in (
        ("SavesToFiles", rf"has a method save\(self, path: 'str' = 'game.json'\) -> 'None', but {wanted}.*rename it"),
        ("LoadsRows", "save or load its state alone; write `save`, too"),
    ):
        with pytest.raises(UserError, match=rf"environment.name=\S+{name}: the class .*{problem}"):
            find_environment(f"{__name__}:{name}")
    assert "has a method save(path: " in (problem_of_state(SavesToFiles()) or ""), "one that a function has made"
    for name in (f"{__name__}:HasAFlag", "tests.support.environments:SavedEffects"):
        assert problem_of_state(find_environment(name)) is None


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
