"""A run that is killed in every phase of a save to an object store, and continued on another machine."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from tests.support.buckets import make_bucket, use_s3
from tests.support.forks import fork_server
from tests.support.jobs import comparable, environment, metrics
from tests.support.toy import toy_config, toy_run
from trainer.checkpoint import manifest as manifests
from trainer.checkpoint.store import open_store
from trainer.config import Config
from trainer.process import time_limits

pytestmark = pytest.mark.slow

STEPS = 7
PHASES = [("begin", 3), ("parts_written", 1), ("manifest_written", 1), ("published", 1), ("hinted", 1), ("deleting", 1)]


def test_a_run_killed_in_every_phase_of_a_save_continues_on_other_machines(s3_url, tmp_path, monkeypatch):
    """Each start is on a machine of its own: the one before has left nothing but what is in the store."""
    whole = toy_run(config(tmp_path / "whole"), tmp_path)
    use_s3(monkeypatch, s3_url)
    root = make_bucket("killed") + "/run"
    for number, (phase, nth) in enumerate(PHASES):
        machine = tmp_path / f"machine{number}"
        kill_at(f"save:{phase},{nth},{tmp_path}/{phase}", tmp_path / phase, machine, root, tmp_path)
        steps = open_store(root).steps()
        assert steps, "something was committed before"
        for step in steps:
            manifests.verify(open_store(root).path(step), "hash")  # the older or the newer state, and both whole
        shutil.rmtree(machine)
    monkeypatch.setattr(time_limits, "LOCK_LEASE_S", 1.0)
    continued = toy_run(config(tmp_path / "last", root), tmp_path)
    assert continued.learner.ranks.number == whole.learner.ranks.number
    assert comparable(metrics(tmp_path / "last")) == comparable(metrics(tmp_path / "whole"))
    assert open_store(root).orphans() == {}


def config(run: Path, root: str = "") -> Config:
    stored = {"ckpt_path": root, "max_ckpts_to_keep": 2} if root else {}
    return toy_config(run, total_steps=STEPS, **stored)


def kill_at(failpoint: str, reached: Path, run: Path, root: str, model: Path) -> None:
    environ = {**environment(), "TRAINER_FAILPOINT": failpoint, "TRAINER_TIME_LIMITS": "LOCK_LEASE_S=1"}
    log = model / "log"
    with log.open("w") as output:
        job = fork_server().start(
            "tests.cpu.kills.test_killed_uploads:job",
            *(str(run), root, str(model)),
            cwd=model,
            env=environ,
            stdout=output,
        )
    while not reached.exists():
        assert job.poll() is None, log.read_text()
        time.sleep(0.02)
    job.kill_group()
    job.wait()


def job(run: str, root: str, model: str) -> None:
    time_limits.read_environment()
    toy_run(config(Path(run), root), Path(model))
