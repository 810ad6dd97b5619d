"""Keys of `environment.*`, and keys that episodes of several turns do not have."""

from __future__ import annotations

from tests.cpu.unit.config.contradictions import (  # noqa: F401
    test_contradictions_are_refused_in_one_sentence,
    test_what_is_at_a_bound_is_accepted,
)
from tests.support.config import config_of

CONTRADICTIONS = [
    (["environment.name=guess"], "environment.name=guess: must be an import path package.module:Class"),
    (
        ["environment.name=guess:Guess", "algorithm.overlong_buffer=4"],
        "algorithm.overlong_buffer=4: is for one completion",
    ),
    (
        ["environment.name=guess:Guess", "rollout.max_prompt_tokens=64", "environment.max_tokens=64"],
        "environment.max_tokens=64: must be above rollout.max_prompt_tokens=64",
    ),
    (
        ["environment.name=guess:Guess", "environment.max_tokens=5000"],
        "environment.max_tokens=5000: exceeds 4096, the longest sequence of the built-in model",
    ),
    (
        ["environment.name=guess:Guess", "environment.agent_address=0.0.0.0"],
        "environment.agent_address=0.0.0.0: is no address that agents can use; set environment.agent_url to one",
    ),
    (
        ["environment.name=guess:Guess", "environment.agent_address='10.0.0.7:http'"],
        "environment.agent_address=10.0.0.7:http: must be HOST or HOST:PORT",
    ),
]
AT_THE_BOUND = [
    ["environment.name=guess:Guess", "environment.agent_address=0.0.0.0", "environment.agent_url=http://gpu7:80"],
    ["environment.agent_address=0.0.0.0"],
    ["environment.name=guess:Guess", "environment.agent_address='[::1]:8123'"],
    ["environment.name=guess:Guess", "rollout.max_prompt_tokens=64", "environment.max_tokens=65"],
    ["rollout=transformers", "environment.max_tokens=5000"],
]


def test_without_an_environment_its_keys_contradict_nothing():
    config_of(["algorithm.overlong_buffer=4", "environment.max_turns=3"])


def test_engines_are_sized_for_the_longest_episode():
    """Where none is given, for a prompt and its completion."""
    plain = ["rollout.max_prompt_tokens=64", "rollout.max_response_tokens=32"]
    episodes = [*plain, "environment.name=guess:Guess", "environment.max_tokens=1000"]
    short = [*episodes[:3], "environment.max_tokens=70"]
    for overrides, length, completion in ((plain, 96, 32), (episodes, 1000, 32), (short, 70, 32)):
        cfg = config_of(overrides)
        rollout = cfg.rollout_of_engines
        assert cfg.longest_sequence == length == rollout.max_prompt_tokens + rollout.max_response_tokens
        assert rollout.max_response_tokens == completion and cfg.rollout.max_prompt_tokens == 64


def test_one_source_decides_for_the_engines_of_all():
    mix = [
        "trainer.val_interval=-1",
        "data.mix.one.synthetic=arithmetic",
        "data.mix.one.size=9",
        "rollout.max_prompt_tokens=64",
    ]
    own = [f"data.mix.one.environment.{setting}" for setting in ("name=a:A", "max_tokens=3000")]
    cfg = config_of([*mix, *own])
    assert cfg.longest_sequence == 3000
