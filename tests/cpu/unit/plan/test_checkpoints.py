"""Sizes of checkpoints and exports, and the cadence of saves."""

from __future__ import annotations

import os

import pytest

from tests.support.ranks import run_ranks
from tests.support.roles import roles
from tests.support.training import config, make_batch
from trainer.checkpoint.sharded import ShardedFiles
from trainer.config import LoraConfig, TinyConfig
from trainer.config.axes import AXES
from trainer.models.tiny import build_tiny
from trainer.plan.checkpoints import checkpoint_bytes, export_bytes, plan_saves
from trainer.plan.ranks import plan_role
from trainer.plan.timing import StepTime
from trainer.plan.workload import workload_of
from trainer.workers.rank import Rank

ALONE = dict.fromkeys(AXES, 1)
SHAPE = TinyConfig(hidden_size=128, intermediate_size=384, num_layers=2)


def planned(cfg):
    return [plan_role(cfg, role, ALONE, workload_of(cfg, ALONE), "cpu") for role in cfg.roles]


def saved_bytes(rank: Rank, path: str, directory: str) -> tuple[int, int]:
    """The bytes of the files of a save, and of an export."""
    rank.build(roles(rank.cfg, ["policy", "critic"]), path)
    for role in ("critic", "policy"):
        rank.update(role, make_batch(), 1)
    rank.begin_save(["policy", "critic"], ShardedFiles(directory))
    saved = sum(entry["bytes"] for entry in rank.finish_save())
    rank.call("policy", "write_weights", os.path.join(directory, "export"), "float32")
    files = os.scandir(os.path.join(directory, "export"))
    return saved, sum(file.stat().st_size for file in files if file.name.endswith(".safetensors"))


def test_a_checkpoint_has_the_planned_size(tmp_path):
    cfg = config()
    cfg.algorithm.advantage_estimator = "gae"
    cfg.model.tiny = SHAPE
    build_tiny(SHAPE, str(tmp_path / "model"))
    saved, exported = run_ranks(1, saved_bytes, str(tmp_path / "model"), str(tmp_path / "save"), cfg=cfg)[0]
    assert 0 <= saved - checkpoint_bytes(planned(cfg)) < 1_000_000  # names and shapes
    assert exported == pytest.approx(export_bytes(cfg, planned(cfg), True), rel=0.01)


def test_adapters_alone_are_saved():
    cfg = config()
    cfg.trainer.policy.lora = LoraConfig(rank=4)
    policy = planned(cfg)[0]
    assert checkpoint_bytes([policy]) == 12 * policy.model.trained < policy.model.total
    assert export_bytes(cfg, [policy], True) == 4 * policy.model.total
    cfg.trainer.hf_save_lora = "adapter"
    assert export_bytes(cfg, [policy], True) == 4 * policy.model.trained


def saves(cfg, rollout_s=6.0, rest_s=4.0, copy_s=1.0, overlaps=False):
    time = StepTime({"rollout": rollout_s, "update": rest_s}, 10, overlaps, 1000)
    return plan_saves(cfg, planned(cfg), time, copy_s, 1e9, True)


def test_a_kill_repeats_half_of_an_interval_without_the_rollouts():
    cfg = config()
    with_journal = saves(cfg)
    cfg.rollout.journal = False
    without = saves(cfg)
    assert with_journal.lost_s == pytest.approx(5 * 4.0 + 3.0)
    assert without.lost_s == pytest.approx(5 * 10.0)
    assert with_journal.kill_s == with_journal.restart_s + with_journal.lost_s


@pytest.mark.parametrize(("rollout_s", "rest_s"), [(6.0, 4.0), (4.0, 6.0)])
def test_a_kill_of_a_run_that_works_ahead_repeats_what_the_ranks_did(rollout_s, rest_s):
    times = {"rollout_s": rollout_s, "rest_s": rest_s, "overlaps": True}
    cfg = config()
    assert saves(cfg, **times).lost_s == pytest.approx(5 * rest_s + rollout_s / 2)
    cfg.rollout.journal = False
    assert saves(cfg, **times).lost_s == pytest.approx(5 * 6.0)


def test_ranks_that_work_beside_the_engines_hide_less_of_a_copy():
    cfg = config()
    assert saves(cfg, copy_s=3.0, overlaps=True).blocked_s == 1.0  # the ranks wait for 2 s of rollouts of 6 s
    assert saves(cfg, rollout_s=4.0, rest_s=6.0, copy_s=3.0, overlaps=True).blocked_s == 3.0


def test_training_waits_for_a_save_that_does_not_hide():
    cfg = config()
    assert saves(cfg).blocked_s == 0
    assert saves(cfg, copy_s=8.0).blocked_s == 2.0
    cfg.trainer.ckpt_async = False
    assert saves(cfg, copy_s=8.0).blocked_s == 8.0 + saves(cfg).write_s  # a save copies before it writes


@pytest.mark.parametrize(("interval", "minutes", "steps"), [(5, -1, 5), ("auto", -1, 17), (-1, 2, 12), (-1, -1, 140)])
def test_the_interval_is_that_of_the_config(interval, minutes, steps):
    cfg = config(ckpt_interval=interval, ckpt_interval_minutes=minutes)
    assert saves(cfg, copy_s=7.0).interval_steps == steps  # auto: sqrt(2 * 1 s * 240 min) = 170 s
