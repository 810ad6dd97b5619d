"""The behaviour that all objectives share."""

from __future__ import annotations

import numpy as np

from trainer.config import AlgorithmConfig, Config
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
    t.critic.optimizer.schedule_steps = 20
    assert scheduled() == {"policy": 7 * 4, "critic": 20 * 4}
    t.policy.optimizer.schedule_steps = 4
    assert scheduled() == {"policy": 1 * 4, "critic": 20 * 4}


def test_mini_batches_are_whole_groups():
    cfg = Config()
    cfg.trainer.mini_batch_size = 2
    groups = np.array([0, 1, 2, 3, 0, 1, 2, 3])
    rows = make_objective(cfg).mini_batches({"group_ids": groups}, 1)
    assert sorted(np.concatenate(rows).tolist()) == list(range(8))
    assert all(len(set(groups[chosen])) == 2 and len(chosen) == 4 for chosen in rows)
