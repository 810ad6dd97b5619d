"""Sections that the user names are typed, bounded and complete."""

from __future__ import annotations

import pytest

from tests.support.config import refusal_of
from trainer.config import EnvironmentConfig, RewardConfig
from trainer.config.data import ValSetConfig
from trainer.config.hydra import read_section
from trainer.errors import UserError


def test_a_section_has_what_is_given_and_the_rest_of_its_base():
    base = ValSetConfig(environment=EnvironmentConfig(name="a:B", max_turns=3, kwargs={"size": 2}))
    section = read_section({"files": ["x.jsonl"], "environment": {"timeout_s": 5}}, "data.val_sets.x", base)
    assert section.files == ["x.jsonl"] and section.interval is None
    assert (section.environment.name, section.environment.max_turns) == ("a:B", 3)
    assert (section.environment.timeout_s, section.environment.kwargs) == (5.0, {"size": 2})
    section.environment.kwargs["size"] = 9
    assert base.environment.kwargs == {"size": 2} and base.files == [], "the base stays as it is"


def test_another_function_does_not_get_the_arguments_of_the_one_before():
    base = ValSetConfig(
        environment=EnvironmentConfig(name="a:B", max_turns=3, kwargs={"size": 2}),
        reward=RewardConfig(name=["gsm8k", "math"], weights=[1.0, 2.0], success_threshold=0.5),
    )
    section = read_section({"environment": {"name": "a:C"}, "reward": {"name": "math"}}, "x", base)
    assert (section.environment.kwargs, section.environment.max_turns) == ({}, 3)
    assert (section.reward.weights, section.reward.success_threshold) == ([], 0.5)
    same = read_section({"environment": {"name": "a:B"}}, "x", base)
    assert same.environment.kwargs == {"size": 2}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (3, "^data.val_sets.x=3: is a section; its keys are files, "),
        ({"file": ["a"]}, "^data.val_sets.x.file: no such key; .*files"),
        ({"n": "many"}, "^data.val_sets.x.n: Value 'many' of type 'str' could not be converted .*; it must be int$"),
        ({"interval": "often"}, "^data.val_sets.x.interval: Value 'often' .*; it must be int . null$"),
        ({"files": "a.jsonl"}, "^data.val_sets.x.files: .*it must be list"),
        ({"environment": {"turns": 2}}, "^data.val_sets.x.environment.turns: no such key; .*max_turns"),
        ({"environment": "a:B"}, "^data.val_sets.x.environment: is a section, and takes no value; its keys are "),
    ],
)
def test_a_wrong_value_is_refused_by_its_key(given, message):
    with pytest.raises(UserError, match=message):
        read_section(given, "data.val_sets.x", ValSetConfig())


def test_a_value_out_of_its_bounds_is_refused_by_its_key():
    of_set, named = "data.val_sets.x", ["data.val_sets.x.files=[a]"]
    assert refusal_of([*named, f"{of_set}.n=0"]) == f"{of_set}.n=0: must be at least 1"
    late = refusal_of([*named, f"{of_set}.reward.timeout_s=-1"])
    assert late == f"{of_set}.reward.timeout_s=-1.0: must be at least 0.001"
