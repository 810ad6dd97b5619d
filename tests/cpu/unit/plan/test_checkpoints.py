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


def saves(cfg, rollout_s=6.0, rest_s=4.0, copy_s=1.0, write_s=0.01, overlaps=False):
    time = StepTime({"rollout": rollout_s, "update": rest_s}, cfg.total_steps, overlaps, 1000)
    roles = planned(cfg)
    return plan_saves(cfg, roles, time, copy_s, checkpoint_bytes(roles) / write_s, True)


class Simulated:
    """A run of steps of 10 s, of which 6 s are rollouts, with its saves.

    Args:
        copy_s: seconds in which a state is copied; the step after waits for it when its rollouts are done.
        write_s: seconds in which the copy is written. A save first waits until the save before has ended.
        resumed: the step of the checkpoint that the run begins with.
        recorded: the last step whose rollouts are in the journal.
    """

    def __init__(
        self,
        steps: int,
        interval: int,
        copy_s: float,
        write_s: float,
        is_async: bool,
        resumed: int = 0,
        recorded: int = 0,
    ):
        self.saves = [(0.0, 0.0, resumed)]
        """Seconds since the start at which it began and was committed, and the step."""
        self.trained = {resumed: 0.0}
        """Seconds since the start at which a step was trained."""
        self.waits_s = now = copied = 0.0
        for step in range(resumed + 1, steps + 1):
            if step > recorded:
                now += 6.0
            self.waits_s += max(0.0, copied - now)
            now = self.trained[step] = max(now, copied) + 4.0
            if step % interval == 0 or step == steps:
                began = max(now, self.saves[-1][1])
                copied = began + copy_s
                self.saves.append((began, copied + write_s, step))
                ended = began if is_async and step < steps else copied + write_s
                self.waits_s += ended - now
                now = ended
        self.end_s = now


def simulated_loss(copy_s: float, write_s: float, is_async: bool, journal: bool) -> float:
    """The seconds by which kills delay the end of a run that saves every tenth step, on average."""
    shared = 80, 10, copy_s, write_s, is_async
    whole = Simulated(*shared)
    (first, *_), (last, *_) = whole.saves[4:6]
    delays = []
    for i in range(400):
        killed = first + (last - first) * (i + 0.5) / 400
        committed = max(step for _, end, step in whole.saves if end <= killed)
        finished = max(step for step, end in whole.trained.items() if end <= killed)
        after = Simulated(*shared, committed, finished if journal else 0)
        delays.append(killed + after.end_s - whole.end_s)
    return sum(delays) / len(delays)


ASYNC = [
    (True, 1.0, 30.0),  # hidden
    (True, 8.0, 30.0),  # the copy takes 2 s longer than the rollouts
    (True, 1.0, 130.0),  # longer than the interval of 100 s
    (True, 8.0, 250.0),
    (False, 1.0, 30.0),
    (False, 1.0, 250.0),
]
"""Whether `trainer.ckpt_async`, and the seconds in which a state is copied and written."""


def test_a_kill_repeats_half_of_an_interval_and_what_was_trained_during_a_save():
    cfg = config()
    with_journal = saves(cfg, write_s=29.0)
    cfg.rollout.journal = False
    without = saves(cfg, write_s=29.0)
    assert with_journal.lost_s == pytest.approx((5 + 3) * 4.0 + 3.0)
    assert without.lost_s == pytest.approx((5 + 3) * 10.0)
    assert with_journal.kill_s == with_journal.restart_s + with_journal.lost_s


def test_a_kill_between_saves_that_follow_each_other_repeats_an_interval_and_half_of_a_save():
    cfg = config()
    cfg.rollout.journal = False
    assert saves(cfg, write_s=149.0).lost_s == pytest.approx(100.0 + 150.0 / 2)
    cfg.trainer.ckpt_async = False  # the save that is committed is not written again
    assert saves(cfg, write_s=149.0).lost_s == pytest.approx((100.0 + 150.0) / 2)


@pytest.mark.parametrize("journal", [False, True])
@pytest.mark.parametrize(("is_async", "copy_s", "write_s"), ASYNC)
def test_a_kill_costs_what_simulated_kills_do(is_async, copy_s, write_s, journal):
    cfg = config(ckpt_async=is_async)
    cfg.rollout.journal = journal
    lost = saves(cfg, copy_s=copy_s, write_s=write_s).lost_s
    simulated = simulated_loss(copy_s, write_s, is_async, journal)
    # With a journal, half of the rollouts of a step, 3 s, is a guess at what the interrupted step generates again.
    assert lost == pytest.approx(simulated, rel=0.01, abs=3.0 if journal else 0)


@pytest.mark.parametrize("journal", [False, True])
def test_a_kill_of_a_run_that_saves_at_its_end_alone_repeats_half_of_it(journal):
    cfg = config(ckpt_interval=-1)
    cfg.rollout.journal = journal
    lost = cfg.total_steps / 2 * (4.0 if journal else 10.0)
    assert saves(cfg, write_s=1e-3, copy_s=0.0).lost_s == pytest.approx(lost + (3.0 if journal else 0), rel=0.001)


@pytest.mark.parametrize(("rollout_s", "rest_s"), [(6.0, 4.0), (4.0, 6.0)])
def test_a_kill_of_a_run_that_works_ahead_repeats_what_the_ranks_did(rollout_s, rest_s):
    times = {"rollout_s": rollout_s, "rest_s": rest_s, "copy_s": 0.0, "write_s": 12.0, "overlaps": True}
    cfg = config()
    assert saves(cfg, **times).lost_s == pytest.approx((5 + 2) * rest_s + rollout_s / 2)
    cfg.rollout.journal = False
    assert saves(cfg, **times).lost_s == pytest.approx((5 + 2) * 6.0)


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


def test_a_save_waits_for_the_one_before():
    cfg = config(ckpt_interval=10)
    assert saves(cfg, write_s=99.0).blocked_s == 0
    assert saves(cfg, write_s=139.0).blocked_s == pytest.approx(1.0 + 139.0 - 100.0)
    assert saves(cfg, copy_s=8.0, write_s=139.0).blocked_s == pytest.approx(8.0 + 139.0 - 100.0)
    cfg.trainer.ckpt_async = False
    assert saves(cfg, write_s=139.0).blocked_s == pytest.approx(1.0 + 139.0)


@pytest.mark.parametrize(("is_async", "copy_s", "write_s"), ASYNC)
@pytest.mark.parametrize(("interval", "steps"), [(10, 140), (10, 137), (1, 3), (-1, 140), (20, 7)])
def test_a_run_waits_for_its_saves(interval, steps, is_async, copy_s, write_s):
    cfg = config(ckpt_interval=interval, ckpt_async=is_async, total_steps=steps)
    simulated = Simulated(steps, steps if interval == -1 else interval, copy_s, write_s, is_async)
    assert saves(cfg, copy_s=copy_s, write_s=write_s).waits_s == pytest.approx(simulated.waits_s)


@pytest.mark.parametrize(
    ("interval", "minutes", "steps"),
    [(5, -1, 5), ("auto", -1, 17), (-1, 2, 12), (-1, -1, 140), (10, 1, 5), (10, 0.5, 2), (10, 2, 10)],
)
def test_the_interval_is_that_of_the_config(interval, minutes, steps):
    cfg = config(ckpt_interval=interval, ckpt_interval_minutes=minutes)
    assert saves(cfg, copy_s=7.0).interval_steps == steps  # auto: sqrt(2 * 1 s * 240 min) = 170 s
