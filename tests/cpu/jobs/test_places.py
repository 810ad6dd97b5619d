"""Directories that a job needs and cannot use: one sentence before anything expensive starts.

The jobs run without the privilege of root to pass over permissions.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.jobs import SMALL, environment
from tests.support.namespaces import with_mounts

JOB = [sys.executable, "-m", "trainer.main", *SMALL, "rollout=transformers"]


def refused(command: list[str], cwd: Path, **env: str) -> str:
    """The one sentence with which the job ends."""
    done = subprocess.run(command, cwd=cwd, env=environment() | env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.count("\n") == 1 and done.stdout == "", done.stdout + done.stderr
    return done.stderr


def without_privilege(command: list[str]) -> list[str]:
    if os.geteuid() != 0:
        return command
    return ["setpriv", "--bounding-set=-dac_override,-dac_read_search", *command]


@pytest.fixture
def read_only(tmp_path):
    path = tmp_path / "read_only"
    path.mkdir(mode=0o555)
    yield path
    path.chmod(0o755)


@pytest.fixture(autouse=True)
def _no_temporary_directory_of_rays(monkeypatch):
    monkeypatch.delenv("RAY_TMPDIR", raising=False)


def test_a_home_without_room_for_the_embedded_model(tmp_path, read_only):
    sentence = refused(without_privilege(["env", "-u", "TRAINER_CACHE", *JOB]), tmp_path, HOME=str(read_only))
    assert "model.cache_dir" in sentence and "TRAINER_CACHE" in sentence


@pytest.mark.parametrize("mode", [[], ["-m", "trainer.seed=1,2"]], ids=["one run", "a sweep"])
def test_a_working_directory_that_cannot_be_written(tmp_path, read_only, mode):
    sentence = refused(without_privilege([*JOB[:3], *mode, *JOB[3:]]), read_only)
    assert ("hydra.sweep.dir" if mode else "trainer.run_dir") in sentence


def test_a_run_directory_that_cannot_be_written(tmp_path, read_only):
    sentence = refused(without_privilege([*JOB, f"trainer.run_dir={read_only}"]), tmp_path)
    assert "trainer.run_dir" in sentence


def test_a_run_directory_on_a_read_only_mount(tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    mounts = [f"--bind {run_dir} {run_dir}", f"-o remount,ro,bind {run_dir}"]
    assert "Read-only" in refused(with_mounts(mounts, [*JOB, f"trainer.run_dir={run_dir}"]), tmp_path)


START = """
import sys
from trainer.cluster.runtime import RayCluster
from trainer.config import Config
from trainer.errors import UserError
try:
    with RayCluster(Config(), "cpu"):
        pass
except UserError as error:
    print(error, file=sys.stderr)
    sys.exit(2)
"""


def start_cluster(cwd: Path, mounts: list[str] | None = None, **env: str) -> str:
    """Start Ray as a job does; the sentence with which it refuses to."""
    command = [sys.executable, "-c", START]
    return refused(with_mounts(mounts, command) if mounts else without_privilege(command), cwd, **env)


@pytest.mark.parametrize("variable", ["TMPDIR", "RAY_TMPDIR"])
def test_a_temporary_directory_that_cannot_be_written(tmp_path, read_only, variable):
    assert f"{variable}={read_only}" in start_cluster(tmp_path, **{variable: str(read_only)})


def test_a_temporary_directory_whose_path_is_too_long_for_sockets(tmp_path):
    long = tmp_path / ("d" * 100)
    long.mkdir()
    sentence = start_cluster(tmp_path, TMPDIR=str(long))
    excess = int(re.search(r"(\d+) characters too long", sentence).group(1))
    assert 0 < excess <= len(str(long))


def test_no_place_has_room_for_rays_objects(tmp_path):
    """Ray would start, and fail at the first large batch."""
    mounts = [f"-t tmpfs -o size=1m tmpfs {place}" for place in ("/dev/shm", "/mnt")]
    sentence = start_cluster(tmp_path, mounts, TMPDIR="/mnt")
    assert "/dev/shm has 1.0 MB free and /mnt has 1.0 MB free" in sentence
