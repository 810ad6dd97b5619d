"""The behaviour that all objectives share."""

from __future__ import annotations

import contextlib
import dataclasses

import numpy as np
import pytest

from tests.support.tables import table
from trainer.config import AlgorithmConfig, Config, OptimizerConfig, RoleSpec, compose, policy_role, tasks
from trainer.errors import UserError
from trainer.objectives import make_objective


def test_a_learning_rate_is_scheduled_over_the_optimizer_steps_of_the_run_or_of_its_own_schedule():
    cfg = Config(algorithm=AlgorithmConfig(advantage_estimator="gae"))
    t = cfg.trainer
    t.train_batch_size, t.mini_batch_size, t.update_epochs, t.total_steps = 64, 32, 2, 10
    t.critic.warmup_steps = 3

    def scheduled() -> dict[str, int]:
        made = make_objective(cfg)
        return {name: made.scheduled_steps(spec) for name, spec in made.roles.items()}

    assert scheduled() == {"policy": 7 * 4, "critic": 10 * 4}
    t.policy.optimizer.schedule_steps = 20
    assert scheduled() == {"policy": 17 * 4, "critic": 20 * 4}
    t.policy.optimizer.schedule_steps = 4
    assert scheduled() == {"policy": 1 * 4, "critic": 4 * 4}


def test_mini_batches_are_whole_groups():
    cfg = Config()
    cfg.trainer.mini_batch_size = 2
    groups = np.array([0, 1, 2, 3, 0, 1, 2, 3])
    rows = make_objective(cfg).mini_batches({"group_ids": groups}, 1)
    assert sorted(np.concatenate(rows).tolist()) == list(range(8))
    assert all(len(set(groups[chosen])) == 2 and len(chosen) == 4 for chosen in rows)


@table(
    "task, problem", [("rl", "rollout.n=1: .*grpo compares"), ("sft", None), ("tests.support.preferences:TASK", None)]
)
def test_only_the_policy_gradient_checks_the_estimator(task, problem):
    cfg = compose([f"trainer.task={task}", "rollout.n=1"])
    with pytest.raises(UserError, match=problem) if problem else contextlib.nullcontext():
        make_objective(cfg).check()


def test_a_policy_gradient_needs_a_loss_for_each_trained_role(monkeypatch):
    def roles(cfg: Config) -> tuple[RoleSpec, ...]:
        return policy_role(cfg), RoleSpec("second", trained=True, optimizer=OptimizerConfig())

    cfg = Config()
    monkeypatch.setattr(tasks, "find_task", lambda name: dataclasses.replace(tasks.TASKS[name], roles=roles))
    monkeypatch.setattr("trainer.config.schema.find_task", tasks.find_task)
    objective = make_objective(cfg)
    with pytest.raises(UserError, match="the role second is trained, and the policy gradient has losses for policy"):
        objective.check()
    objective.losses["second"] = objective.losses["policy"]
    objective.check()
