"""Keys of verl, SkyRL and TRL are refused with the keys that take their place."""

import re

from tests.support.config import explained
from trainer.config.schema import counterpart_of, foreign_keys, is_name


def test_a_foreign_key_is_refused_with_its_counterpart():
    for key, here in foreign_keys().items():
        assert not is_name(key) and all(map(is_name, re.sub(r" \(.*?\)", "", here).split(", "))), key
    assert explained("actor_rollout_ref.rollout.n=4") == (
        "actor_rollout_ref.rollout.n: no such key; in place of actor_rollout_ref.rollout.n, this project has rollout.n"
    )
    assert counterpart_of("actor_rollout_ref.rollout.free_cache_engine").endswith("this project has rollout")
    assert counterpart_of("reward.custom_reward_function.path").startswith("in place of custom_reward_function, ")
    assert counterpart_of("trainer.learning_rate").startswith("in place of learning_rate, ")
    for key in ("trainer.policy.optimizer.beta", "trainer.sed", "environment.max_steps"):
        assert counterpart_of(key) == "", key
    assert explained("nothing.n=1").count("nothing") == 1  # the section is not named beside the key in it
