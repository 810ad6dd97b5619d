"""Sections that the user names are typed, bounded and complete."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from trainer.config import EnvironmentConfig, RewardConfig
from trainer.config.fields import Section, number, setting, subsection
from trainer.config.named_sections import read_section
from trainer.errors import UserError


@dataclass
class Named(Section):
    files: list[str] = setting(default_factory=list, resume="harmless")
    n: int = number(1, at_least=1, resume="harmless")
    interval: int | None = number(None, at_least=1, off=-1, resume="harmless")
    environment: EnvironmentConfig = subsection(EnvironmentConfig)
    reward: RewardConfig = subsection(RewardConfig)


def test_a_section_has_what_is_given_and_the_rest_of_its_base():
    base = Named(environment=EnvironmentConfig(name="a:B", max_turns=3, kwargs={"size": 2}))
    section = read_section(Named, {"files": ["x.jsonl"], "environment": {"timeout_s": 5}}, "data.sets.x", base)
    assert section.files == ["x.jsonl"] and section.interval is None
    assert (section.environment.name, section.environment.max_turns) == ("a:B", 3)
    assert (section.environment.timeout_s, section.environment.kwargs) == (5.0, {"size": 2})
    section.environment.kwargs["size"] = 9
    assert base.environment.kwargs == {"size": 2} and base.files == [], "the base stays as it is"


def test_another_function_does_not_get_the_arguments_of_the_one_before():
    base = Named(
        environment=EnvironmentConfig(name="a:B", max_turns=3, kwargs={"size": 2}),
        reward=RewardConfig(name=["gsm8k", "math"], weights=[1.0, 2.0], success_threshold=0.5),
    )
    section = read_section(Named, {"environment": {"name": "a:C"}, "reward": {"name": "math"}}, "x", base)
    assert (section.environment.kwargs, section.environment.max_turns) == ({}, 3)
    assert (section.reward.weights, section.reward.success_threshold) == ([], 0.5)
    same = read_section(Named, {"environment": {"name": "a:B"}}, "x", base)
    assert same.environment.kwargs == {"size": 2}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (3, "^data.sets.x=3: is a section; its keys are files, n, interval, environment, reward$"),
        ({"file": ["a"]}, "^data.sets.x.file: no such key; .*files"),
        ({"n": 0}, "^data.sets.x.n=0: must be at least 1$"),
        ({"n": "many"}, "^data.sets.x.n=many: must be a whole number$"),
        ({"interval": "often"}, "^data.sets.x.interval=often: must be a whole number, or null$"),
        ({"files": "a.jsonl"}, r"^data.sets.x.files=a.jsonl: must be a list \[VALUE, VALUE\]$"),
        ({"reward": {"timeout_s": -1}}, "^data.sets.x.reward.timeout_s=-1.0: must be at least 0.001$"),
        ({"environment": {"turns": 2}}, "^data.sets.x.environment.turns: no such key; .*max_turns"),
        ({"environment": "a:B"}, "^data.sets.x.environment=a:B: is a section; its keys are name, "),
    ],
)
def test_a_wrong_value_is_refused_by_its_key(given, message):
    with pytest.raises(UserError, match=message):
        read_section(Named, given, "data.sets.x")
