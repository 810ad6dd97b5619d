"""What the task `sft` makes of a config."""

from __future__ import annotations

from trainer.config import compose
from trainer.objectives import make_objective


def test_a_step_is_one_optimizer_step_with_the_optimizer_of_sft_alone():
    """Whatever the keys of other tasks say, which are not refused either."""
    others = ["algorithm=ppo", "trainer.update_epochs=3", "trainer.critic.warmup_steps=500", "rollout.dtype=bfloat16"]
    optimizer = ["sft.optimizer.lr=0.25", "sft.optimizer.schedule_steps=5"]
    cfg = compose(["trainer.task=sft", "sft.steps=7", *optimizer, *others])
    objective, (policy,) = make_objective(cfg), cfg.roles
    assert policy.name == "policy" and policy.optimizer is cfg.sft.optimizer
    assert (policy.optimizer_steps(3), objective.scheduled_steps(policy), objective.temperature) == (3, 5, 1.0)
    assert (cfg.total_steps, cfg.num_engines, cfg.export_dtype, cfg.validates_start) == (7, 0, "float32", False)
    cfg.sft.optimizer.schedule_steps = None
    assert objective.scheduled_steps(policy) == 7
