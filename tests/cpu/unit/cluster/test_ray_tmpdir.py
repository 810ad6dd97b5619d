"""Directories for Ray that cannot be used: one sentence before Ray starts."""

from __future__ import annotations

import sys

import pytest

from tests.support.namespaces import with_mounts
from tests.support.refusals import refused
from trainer.cluster.ray_head import check_tmpdir
from trainer.errors import UserError


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


def test_a_temporary_directory_that_cannot_be_used_is_refused(tmp_path, monkeypatch):
    long = tmp_path / ("d" * 100)
    for variable in ("TMPDIR", "RAY_TMPDIR"):
        monkeypatch.setenv(variable, str(long))
        with pytest.raises(UserError, match=rf"^{variable}=.*: the path is \d+ characters too long"):
            check_tmpdir(1)
        monkeypatch.setenv(variable, "/proc/nowhere")
        with pytest.raises(UserError, match=f"^{variable}=/proc/nowhere: .* not writable"):
            check_tmpdir(1)


def test_too_little_space_for_rays_objects_is_refused(tmp_path):
    """Ray would start, and fail at the first large batch."""
    mounts = [f"-t tmpfs -o size=1m tmpfs {place}" for place in ("/dev/shm", "/mnt")]
    sentence = refused(with_mounts(mounts, [sys.executable, "-c", START]), tmp_path, TMPDIR="/mnt")
    assert "/dev/shm has 1.0 MB free and /mnt has 1.0 MB free" in sentence
