"""Directories for Ray that cannot be used: one sentence before Ray starts."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.support.namespaces import with_mounts
from tests.support.refusals import refused, without_privilege


@pytest.fixture(autouse=True)
def _no_temporary_directory_of_rays(monkeypatch):
    monkeypatch.delenv("RAY_TMPDIR", raising=False)


START = """
import sys
from trainer.cluster.ray_cluster import RayCluster
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
def test_an_unwritable_temporary_directory_is_refused(tmp_path, read_only, variable):
    assert f"{variable}={read_only}" in start_cluster(tmp_path, **{variable: str(read_only)})


def test_a_temporary_directory_with_a_path_too_long_for_sockets_is_refused(tmp_path):
    long = tmp_path / ("d" * 100)
    long.mkdir()
    sentence = start_cluster(tmp_path, TMPDIR=str(long))
    excess = int(re.search(r"(\d+) characters too long", sentence).group(1))
    assert 0 < excess <= len(str(long))


def test_too_little_space_for_rays_objects_is_refused(tmp_path):
    """Ray would start, and fail at the first large batch."""
    mounts = [f"-t tmpfs -o size=1m tmpfs {place}" for place in ("/dev/shm", "/mnt")]
    sentence = start_cluster(tmp_path, mounts, TMPDIR="/mnt")
    assert "/dev/shm has 1.0 MB free and /mnt has 1.0 MB free" in sentence
