"""Directories that a job needs and cannot use: one sentence before anything expensive starts.

The jobs run without the privilege of root to pass over permissions."""

from __future__ import annotations

import sys

import pytest

from tests.support.jobs import SMALL
from tests.support.namespaces import with_mounts
from tests.support.refusals import refused, without_privilege

JOB = [sys.executable, "-m", "trainer", "train", *SMALL, "rollout=transformers"]


@pytest.fixture(autouse=True)
def _no_temporary_directory_of_rays(monkeypatch):
    monkeypatch.delenv("RAY_TMPDIR", raising=False)


def test_a_home_without_room_for_the_embedded_model(tmp_path, read_only):
    sentence = refused(without_privilege(["env", "-u", "TRAINER_CACHE", *JOB]), tmp_path, HOME=str(read_only))
    assert "model.cache_dir" in sentence and "TRAINER_CACHE" in sentence


def test_a_working_directory_of_a_sweep_that_cannot_be_written(read_only):
    sentence = refused(without_privilege([*JOB[:4], "-m", "trainer.seed=1,2", *JOB[4:]]), read_only)
    assert "hydra.sweep.dir" in sentence


def test_a_run_directory_that_cannot_be_written(tmp_path, read_only):
    sentence = refused(without_privilege([*JOB, f"trainer.run_dir={read_only}"]), tmp_path)
    assert "trainer.run_dir" in sentence


def test_a_run_directory_on_a_read_only_mount(tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    mounts = [f"--bind {run_dir} {run_dir}", f"-o remount,ro,bind {run_dir}"]
    assert "Read-only" in refused(with_mounts(mounts, [*JOB, f"trainer.run_dir={run_dir}"]), tmp_path)
