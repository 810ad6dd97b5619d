"""Rules of saving and restoring, one by one: verification, deletion, retention, lock, schedule."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from tests.support.checkpoints import hidden, manager, save
from trainer.checkpoint import manifest as manifests
from trainer.checkpoint.lock import RunLock
from trainer.checkpoint.manifest import DamagedError, verify
from trainer.checkpoint.parts import is_allowed
from trainer.checkpoint.retention import Retention
from trainer.errors import UserError
from trainer.run.schedule import SaveSchedule


def test_each_level_of_verification_finds_what_it_says(tmp_path):
    shard = Path(save(manager(tmp_path), 1)) / "weights/shard"
    found = {}
    for content in (b"abc", b"abd", b"ab", b"abcd", None):
        if content is None:
            shard.unlink()
        else:
            shard.write_bytes(content)
        for level in manifests.VERIFY:
            try:
                verify(str(tmp_path / "global_step_1"), level)
            except DamagedError as error:
                assert "weights/shard" in str(error)
                found.setdefault(content, []).append(level)
    sizes = ["hash", "size"]
    assert found == {b"abd": ["hash"], b"ab": sizes, b"abcd": sizes, None: sizes}


def test_latest_before_a_step_leaves_out_that_step(tmp_path):
    checkpoints = manager(tmp_path)
    for step in (1, 2, 3):
        save(checkpoints, step)
    assert checkpoints.latest(before=3).step == 2
    assert checkpoints.latest(before=1) is None


def test_a_checkpoint_loses_its_name_before_its_files_are_deleted(tmp_path, monkeypatch):
    checkpoints = manager(tmp_path, Retention(newest=1))
    save(checkpoints, 1)
    seen = {}
    monkeypatch.setattr(
        "trainer.checkpoint.manager.failpoint", lambda name: seen.setdefault(name, set(os.listdir(tmp_path)))
    )
    save(checkpoints, 2)
    assert "global_step_1" in seen["save:hinted"], "deleted before the next one was there"
    assert "global_step_1" not in seen["save:deleting"]
    assert [name for name in seen["save:deleting"] if name.startswith(".deleting-global_step_1-")]
    assert checkpoints.steps() == [2] and hidden(tmp_path) == []


def test_of_two_equal_scores_the_earlier_is_kept():
    scores = {1: 0.1, 2: 0.5, 3: 0.5, 4: 0.3}
    assert Retention(newest=1, best=1).disposable(scores) == [1, 3]
    assert Retention(newest=1, best=1, best_mode="min").disposable({1: 0.5, 2: 0.1, 3: 0.1, 4: 0.3}) == [1, 3]


def test_a_lock_that_was_lost_is_not_released(tmp_path):
    with RunLock(str(tmp_path), 60) as lock:
        lock.acquire()
        other = {**json.loads((tmp_path / ".lock").read_text()), "token": "another job"}
        (tmp_path / ".lock").write_text(json.dumps(other))
        with pytest.raises(UserError, match="lost"):
            lock.check()
    assert json.loads((tmp_path / ".lock").read_text()) == other
    (tmp_path / ".lock").unlink()
    with RunLock(str(tmp_path), 60) as lock:
        lock.acquire()
    assert not (tmp_path / ".lock").exists()


def test_a_lock_that_is_held_shows_signs_of_life(tmp_path):
    with RunLock(str(tmp_path), timeout_s=0.6) as lock:
        lock.acquire()
        first = os.stat(tmp_path / ".lock").st_mtime_ns
        deadline = time.monotonic() + 60
        while os.stat(tmp_path / ".lock").st_mtime_ns == first:
            assert time.monotonic() < deadline, "no heartbeat came"
            time.sleep(0.05)


def test_a_change_is_allowed_by_its_key_or_section_and_not_by_the_beginning_of_its_name():
    assert is_allowed("algorithm.kl_coef", ["algorithm.kl_coef"]) and is_allowed("algorithm.kl_coef", ["algorithm"])
    for near in ("algorithm.kl", "algo", "algorithm.kl_coef.x", "kl_coef"):
        assert not is_allowed("algorithm.kl_coef", [near]), near


def test_a_save_that_cost_much_is_forgotten_by_halves():
    schedule = SaveSchedule("auto", -1, mean_time_between_failures=50)
    schedule.measured(blocked_s=8.0, duration_s=1.0)
    for cost in (4.0, 2.0, 1.0):
        schedule.measured(blocked_s=0.5, duration_s=1.0)
        assert schedule.best_interval_s() == pytest.approx((2 * cost * 3000) ** 0.5)
