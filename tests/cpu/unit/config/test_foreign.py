"""Keys of verl, SkyRL and TRL are refused with the keys that take their place."""

import re

import pytest

from tests.support.config import explained
from trainer.config import Config
from trainer.config.fields import walk_keys, walk_sections
from trainer.config.foreign import FOREIGN, counterpart_of

NAMES = {name for walk in (walk_keys, walk_sections) for name, *_ in walk(Config())}
ROWS = [(package, key, here) for package, keys in FOREIGN.items() for key, here in keys.items()]


@pytest.mark.parametrize("package, key, here", ROWS)
def test_counterparts_are_names_of_this_project_and_foreign_keys_are_not(package, key, here):
    assert key not in NAMES
    assert set(re.sub(r" \(.*?\)", "", here).split(", ")) <= NAMES


@pytest.mark.parametrize("package, key, here", ROWS[::10])
def test_a_foreign_key_in_a_command_is_refused_with_its_counterpart(package, key, here):
    sentence = explained(f"{key}=1")
    assert sentence is not None and sentence.startswith(f"{key}: no such key; in place of "), sentence
    assert "\n" not in sentence
    assert here in sentence or counterpart_of(key) in sentence  # a few keys are in two packages


def test_a_key_below_a_foreign_section_names_the_section_and_a_section_before_a_key_of_trl_is_allowed():
    assert counterpart_of("actor_rollout_ref.rollout.free_cache_engine").endswith("this project has rollout")
    assert counterpart_of("reward.custom_reward_function.path").startswith(
        "in place of verl's custom_reward_function, "
    )
    assert counterpart_of("trainer.learning_rate").startswith("in place of TRL's learning_rate, ")
    assert counterpart_of("trainer.policy.optimizer.beta") == counterpart_of("trainer.sed") == ""
    assert counterpart_of("environment.max_steps") == ""


def test_a_wrong_section_is_not_named_beside_the_key_in_it():
    assert explained("nothing.n=1").count("nothing") == 1
