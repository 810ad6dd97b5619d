"""Optimizers, adapters and sharding of the roles, and keys of roles that a run does not have."""

from __future__ import annotations

import dataclasses

from tests.cpu.unit.config.contradictions import test_contradictions_are_refused_in_one_sentence  # noqa: F401
from tests.support.config import config_of
from trainer.config import compose

CONTRADICTIONS = [
    (["trainer.policy.optimizer.betas=[0.9,5]"], "trainer.policy.optimizer.betas=.*: must be two numbers"),
    (["trainer.critic.optimizer.lr=1e-4"], "trainer.critic.optimizer.lr.*algorithm=ppo"),
    (["algorithm=ppo", "trainer.critic.warmup_steps=140"], "trainer.critic.warmup_steps=140: leaves no step"),
    (["trainer.policy.lora.alpha=8"], "trainer.policy.lora.alpha=8.0: needs trainer.policy.lora.rank"),
]


def test_a_critic_that_warms_up_leaves_the_policy_fewer_optimizer_steps():
    cfg = config_of(["algorithm=ppo", "trainer.mini_batch_size=32", "trainer.critic.warmup_steps=3"])
    cfg.trainer.update_epochs = 2
    policy, critic, *_ = cfg.roles
    assert [critic.optimizer_steps(steps) for steps in (2, 5)] == [2 * 4, 5 * 4]
    assert [policy.optimizer_steps(steps) for steps in (2, 5)] == [0, 2 * 4]


def test_the_critic_the_reference_and_supervised_training_follow_the_policy():
    words = ["trainer.policy.optimizer.weight_decay=0.1", "trainer.policy.optimizer.scheduler=cosine"]
    words += ["trainer.policy.fsdp.param_dtype=bfloat16"]
    policy, critic, reference = config_of(["algorithm=ppo", *words]).roles
    assert critic.optimizer == dataclasses.replace(policy.optimizer, lr=5 * policy.optimizer.lr)
    assert critic.sharding == reference.sharding == policy.sharding and critic.lora == policy.lora
    (policy,) = config_of(["trainer.task=sft", "sft.optimizer.lr=0.5", *words]).roles
    assert (policy.optimizer.lr, policy.optimizer.warmup_steps, policy.optimizer.scheduler) == (0.5, 10, "constant")
    assert (policy.optimizer.weight_decay, policy.optimizer.schedule_steps) == (0.1, None)


def test_another_model_is_not_trained_with_the_settings_of_the_embedded_one():
    embedded, own = (compose(overrides).trainer.policy.optimizer for overrides in ([], ["model.path=a/model"]))
    assert (embedded.lr, embedded.scheduler, embedded.schedule_steps) == (4e-4, "cosine", 140)
    assert own == compose(["model=qwen3_0.6b"]).trainer.policy.optimizer
    assert (own.lr, own.warmup_steps, own.scheduler, own.schedule_steps) == (1e-6, 0, "constant", None)
