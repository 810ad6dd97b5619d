"""Keys of `reward.*`: names, weights, and the address of a server."""

from __future__ import annotations

from tests.cpu.unit.config.contradictions import (  # noqa: F401
    test_contradictions_are_refused_in_one_sentence,
    test_what_is_at_a_bound_is_accepted,
)
from tests.support.config import refusal_of
from trainer.config import RewardConfig

CONTRADICTIONS = [
    (["reward.name=[math,gsm8k]", "reward.weights=[1]"], "reward.weights=.*a weight for each of the 2 rewards"),
    (["reward.name=[math,gsm8k]", "reward.weights=[1,2,3]"], "reward.weights=.*a weight for each of the 2 rewards"),
    (["reward.name=remote", "reward.url=http://judge:0/score"], "reward.url=.*must be an address such as"),
    (["reward.name=remote", "reward.url=http://judge:x/score"], "reward.url=.*must be an address such as"),
    (["reward.name=[]"], r"reward.name=\[\]: must be a name, or a list of names"),
    (["reward.name=[math,math]"], "reward.name=.*names a reward twice; give it a weight instead"),
    (["reward.name=remote"], "reward.name=remote: remote needs reward.url"),
    (["reward.url=http://judge/score"], "reward.url=.*is used by the reward remote alone"),
    (["reward.name=remote", "reward.url=judge"], "reward.url=judge: must be an address such as"),
    (["reward.name=model"], "reward.name=model: model needs reward.model.path"),
    (["reward.model.url=http://a:1"], "reward.model.url=http://a:1: is read by the reward model alone"),
    (["reward.name=model", "reward.model.url=http://a:1", "reward.model.path=x"], "is on a server or on the ranks"),
    (["reward.model.path=x"], "reward.model.path=x: is read by the reward model alone"),
    (["reward.name=[model,math]", "reward.model.path=x"], "reward.name=.*model gives the whole reward; name it alone"),
]
AT_THE_BOUND = [
    ["reward.name=[math,gsm8k]", "reward.weights=[1,2]"],
    ["reward.name=remote", "reward.url=http://judge:1/score"],
    ["reward.name=model", "reward.model.path=x"],
    ["reward.name=model", "reward.model.url=http://a:1"],
]


def test_credentials_in_an_address_are_refused_and_not_shown():
    sentence = refusal_of(["reward.name=remote", "reward.url=http://me:hush@judge/score"])
    assert sentence == "reward.url: holds credentials, which would be saved; use reward.authorization_env"


def test_one_reward_and_several_are_a_list_of_names():
    assert (RewardConfig(name="math").names(), RewardConfig(name="math").key()) == (["math"], "reward.name=math")
    several = RewardConfig(name=["math", "gsm8k"])
    assert (several.names(), several.key()) == (["math", "gsm8k"], "reward.name=math,gsm8k")
