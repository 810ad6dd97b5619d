"""Optimizers, adapters and sharding of the roles, and keys of roles that a run does not have."""

from __future__ import annotations

import pytest

from tests.cpu.unit.config.contradictions import test_contradictions_are_refused_in_one_sentence  # noqa: F401
from trainer.config import FSDPConfig, compose

CONTRADICTIONS = [
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


def test_a_critic_that_warms_up_leaves_the_policy_fewer_optimizer_steps():
    cfg = compose(["algorithm=ppo", "trainer.mini_batch_size=32", "trainer.critic.warmup_steps=3"])
    cfg.trainer.update_epochs = 2
    policy, critic, *_ = cfg.roles
    assert [critic.optimizer_steps(steps) for steps in (2, 5)] == [2 * 4, 5 * 4]
    assert [policy.optimizer_steps(steps) for steps in (2, 5)] == [0, 2 * 4]


@pytest.mark.parametrize(("given", "mode"), [(True, "full"), (False, "none"), ("selective", "selective")])
def test_checkpointing_of_activations_that_was_true_or_false_has_a_name_now(given, mode):
    assert FSDPConfig(activation_checkpointing=given).activation_checkpointing == mode
