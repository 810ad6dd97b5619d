"""The whole config: contradictions between keys, names of keys, and what follows from several keys."""

from __future__ import annotations

import re

import pytest

from tests.support.config import refusal_of
from trainer.config import (
    OPEN_SECTIONS,
    compose,
    valid_keys,
)

BASE = compose([])

ROLES = [
    (["trainer.policy.optimizer.betas=[0.9,5]"], "trainer.policy.optimizer.betas=.*: must be two numbers"),
    (["sft.optimizer.betas=[0.9]"], "sft.optimizer.betas=.*: must be two numbers"),
    (["trainer.critic.optimizer.lr=1e-4"], "trainer.critic.optimizer.lr.*algorithm=ppo"),
    (["trainer.critic.lora.rank=4"], "trainer.critic.lora.rank=4: .*has no critic"),
    (["algorithm=ppo", "trainer.critic.warmup_steps=140"], "trainer.critic.warmup_steps=140: leaves no step"),
    (["algorithm.kl_coef=0", "trainer.reference.fsdp.cpu_offload=true"], "trainer.reference.fsdp.cpu_offload"),
    (["trainer.policy.lora.alpha=8"], "trainer.policy.lora.alpha=8.0: needs trainer.policy.lora.rank"),
    (
        ["trainer.policy.lora.rank=4", "trainer.reference.fsdp.cpu_offload=true"],
        "trainer.reference.fsdp.cpu_offload=True: .*without its adapters is the reference",
    ),
]
ENVIRONMENT = [
    (["environment.name=guess"], "environment.name=guess: must be an import path package.module:Class"),
    (
        ["environment.name=guess:Guess", "algorithm.overlong_buffer=4"],
        "algorithm.overlong_buffer=4: is for one completion",
    ),
]
SUPERVISED = [
    (["sft.source=rollouts"], "sft.source=rollouts: needs data.train_files"),
    (["sft.min_reward=1"], "sft.min_reward=1.0: .*sft.source=rollouts"),
    (["sft.max_weight=2"], "sft.max_weight=2.0: .*sft.source=rollouts"),
    (["sft.train_on=[]"], r"sft.train_on=\[\]: names no role"),
    (["sft.weights=[1,2]"], r"sft.weights=\[1.0, 2.0\]: must name one weight for each of the 0"),
    (
        ["data=files", "data.train_files=[a,b]", "data.val_files=[c]", "sft.weights=[1,0]"],
        r"sft.weights=\[1.0, 0.0\]: must be numbers above 0",
    ),
]


def test_a_critic_that_warms_up_leaves_the_policy_fewer_optimizer_steps():
    cfg = compose(["algorithm=ppo", "trainer.mini_batch_size=32", "trainer.critic.warmup_steps=3"])
    cfg.trainer.update_epochs = 2
    policy, critic, *_ = cfg.roles
    assert [critic.optimizer_steps(steps) for steps in (2, 5)] == [2 * 4, 5 * 4]
    assert [policy.optimizer_steps(steps) for steps in (2, 5)] == [0, 2 * 4]


@pytest.mark.parametrize("overrides, sentence", ROLES + ENVIRONMENT + SUPERVISED)
def test_contradictions_are_refused_in_one_sentence(overrides, sentence):
    assert re.search(sentence, refusal_of(overrides))


def test_open_sections_are_those_with_keys_of_the_users_choice():
    assert OPEN_SECTIONS == (
        "trainer.divergence_limits",
        "algorithm.options",
        "model.chat_template_kwargs",
        "data.synthetic_args",
        "environment.kwargs",
        "rollout.engine_args",
    )


def test_valid_keys_are_those_below_a_section():
    assert valid_keys()[:2] == ["trainer", "algorithm"]
    assert valid_keys("reward.remote") == [
        "reward.remote.completions_per_request",
        "reward.remote.deadline_s",
        "reward.remote.header",
        "reward.remote.header_env",
    ]
    assert valid_keys("nothing") == []


@pytest.mark.parametrize(
    "overrides, adapter, base",
    [
        ([], False, False),
        (["trainer.policy.lora.rank=8"], True, True),
        (["trainer.policy.lora.rank=8", "rollout=transformers"], False, True),
        (["trainer.policy.lora.rank=8", "rollout.lora_sync=merged", "trainer.colocate_roles=false"], False, False),
        (["trainer.policy.lora.rank=600", "algorithm.ref_sync_interval=2"], False, False),
    ],
)
def test_who_gets_adapters_and_who_is_the_reference(overrides, adapter, base):
    config = compose(overrides)
    assert (config.syncs_adapter, any(role.is_policy_base for role in config.roles)) == (adapter, base)
