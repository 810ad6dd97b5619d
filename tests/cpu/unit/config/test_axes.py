"""The table of axes, and what the config refuses because of it."""

from __future__ import annotations

import dataclasses

import pytest

from tests.support.config import check_rules
from trainer.config import Config, FSDPConfig, RoleSpec, policy_role
from trainer.config.tasks import TASKS, find_task
from trainer.config.trainer import LAYOUT_KEYS
from trainer.errors import UserError
from trainer.parallel.axes import AXES, axis_sizes


def config(**trainer) -> Config:
    cfg = Config()
    cfg.trainer = dataclasses.replace(cfg.trainer, **trainer)
    return cfg


def test_sizes_follow_from_the_config_and_the_number_of_ranks():
    trainer = config(dp_replicate=2, context_parallel_size=3, tensor_parallel_size=5).trainer
    assert axis_sizes(trainer, 120) == {"dp_replicate": 2, "dp_shard": 4, "cp": 3, "tp": 5}
    assert axis_sizes(trainer)["dp_shard"] == 1 and trainer.layout_size == 30


def test_axes_that_fsdp_shards_over_are_neighbours_and_those_with_the_same_rows_the_fastest():
    assert set(LAYOUT_KEYS) == {axis.key for axis in AXES.values() if axis.key}
    sharded = [axis.shards_weights for axis in AXES.values()]
    first, last = sharded.index(True), len(sharded) - sharded[::-1].index(True)
    assert all(sharded[first:last])
    same_rows = [axis.same_rows for axis in AXES.values()]
    assert same_rows == sorted(same_rows)


def test_compiled_blocks_of_any_role_are_refused_with_tensor_parallelism(monkeypatch):
    cfg = config(num_workers=2, tensor_parallel_size=2)
    second = RoleSpec("second", sharding=FSDPConfig(compile=True))
    task = dataclasses.replace(TASKS["rl"], roles=lambda cfg: (policy_role(cfg), second))
    monkeypatch.setitem(TASKS, "rl", task)
    find_task.cache_clear()
    try:
        problem = r"RoleSpec\('second'\).sharding.compile=True: cannot be combined with trainer.tensor_parallel_size"
        with pytest.raises(UserError, match=problem):
            check_rules(cfg, "trainer")
        cfg.trainer.policy.fsdp.compile = True
        with pytest.raises(UserError, match=r"trainer.policy.fsdp.compile=True: cannot be combined"):
            check_rules(cfg, "trainer")
    finally:
        find_task.cache_clear()
