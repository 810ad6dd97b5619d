"""The locks on the directories of a run, and the test that checkpoints can be written."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from tests.support.runs import OpenRun, configured
from trainer.checkpoint.components import json_component
from trainer.checkpoint.lock import RunLock
from trainer.errors import UserError
from trainer.process import time_limits
from trainer.run.directory import RunDirectory


@pytest.mark.parametrize("how", ["a file", "a dangling link", "nowhere"])
def test_an_unusable_checkpoint_directory_is_refused_before_anything_starts(tmp_path, how):
    path = Path("/proc/nowhere/checkpoints") if how == "nowhere" else tmp_path / "checkpoints"
    if how == "a file":
        path.write_text("")
    elif how == "a dangling link":
        path.symlink_to(tmp_path / "not mounted")
    with pytest.raises(UserError, match="trainer.ckpt_path=.*cannot be written there .*choose another"):
        RunDirectory(configured(tmp_path / "run", ckpt_path=str(path))).open()
    assert os.listdir(tmp_path / "run") == [], "the refusal gave the lock back"


def test_testing_the_checkpoint_directory_leaves_no_files(tmp_path, caplog):
    caplog.set_level("INFO")
    left = tmp_path / "checkpoints/.probe-of-a-killed-job"
    with OpenRun(configured(tmp_path)):
        left.mkdir()
    with OpenRun(configured(tmp_path)):
        assert caplog.messages == [f"removed {left}, an interrupted test"]
    assert os.listdir(tmp_path / "checkpoints") == []


def test_two_runs_cannot_save_to_one_directory(tmp_path):
    shared = str(tmp_path / "shared")
    with OpenRun(configured(tmp_path / "a", ckpt_path=shared)):
        (tmp_path / "link").symlink_to(shared)
        for place in (shared, str(tmp_path / "link")):
            with pytest.raises(UserError, match="in use by process .*choose another trainer.ckpt_path"):
                RunDirectory(configured(tmp_path / "b", ckpt_path=place)).open()
    with OpenRun(configured(tmp_path / "b", ckpt_path=shared)):
        pass
    with OpenRun(configured(tmp_path / "c", ckpt_path=str(tmp_path / "c"))):
        pass  # one directory for both


def test_a_job_that_lost_its_checkpoint_directory_writes_no_files_there(tmp_path):
    with OpenRun(configured(tmp_path / "a", ckpt_path=str(tmp_path / "shared")), {"step": 1}) as run:
        (tmp_path / "shared/.lock").unlink()
        with RunLock(str(tmp_path / "shared"), 60) as other:
            other.acquire()
            begun: list[str] = []
            run.components.append(json_component("more", lambda: begun.append("more") or {}, lambda _: None))
            run.save(1)
            (outcome,) = run.directory.checkpoints.results()
            assert begun == [] and "lost the checkpoint directory to process" in outcome.error
            assert sorted(os.listdir(tmp_path / "shared")) == [".lock", ".lock.guard"]


HOLDS_A_RUN = """
import sys, time
from pathlib import Path
from tests.support.runs import OpenRun, configured
with OpenRun(configured(Path(sys.argv[1]))):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_job_that_beats_once_more_while_it_dies_is_dead_all_the_same(tmp_path, monkeypatch):
    """After this process has begun to wait for the lock before."""
    monkeypatch.setattr(time_limits, "LOCK_LEASE_S", 1.0)
    owner = {"token": "x", "host": "elsewhere", "machine": "another", "pid": 1, "started": "1", "since": "then"}
    for name in ("run", "shared"):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".lock").write_text(json.dumps(owner))
    last = threading.Timer(0.5, os.utime, [tmp_path / "shared/.lock"])
    last.start()
    with OpenRun(configured(tmp_path / "run", ckpt_path=str(tmp_path / "shared"))):
        assert not last.is_alive() and json.loads((tmp_path / "shared/.lock").read_text()) != owner


def test_checkpoints_on_a_disk_that_is_not_mounted_are_refused(tmp_path):
    (tmp_path / "scratch").symlink_to(tmp_path / "not mounted")
    path = tmp_path / "scratch/a/b"
    with pytest.raises(UserError, match="trainer.ckpt_path=.*/scratch/a/b: checkpoints cannot be written there"):
        RunDirectory(configured(tmp_path / "run", ckpt_path=str(path))).open()
