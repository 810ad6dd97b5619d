"""One Ray of this process for all tests of the package."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainer.cluster.ray_cluster import RayCluster
from trainer.config import Config


def settings() -> Config:
    """Ray has capacity for two ranks and three engines, which suffices for the two groups of a test."""
    cfg = Config()
    cfg.trainer.num_workers, cfg.rollout.num_engines = 2, 3
    return cfg


@pytest.fixture(scope="package")
def job_directory(tmp_path_factory) -> Path:
    """The working directory of a job, with modules of the user that have names of others."""
    path = tmp_path_factory.mktemp("job")
    for name in ("trainer", "json", "pickle", "own_reward"):
        (path / f"{name}.py").write_text("")
    return path


@pytest.fixture(scope="package")
def ray_cluster(job_directory) -> Iterator[RayCluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", "/tmp")  # pytest's own paths are too long for sockets
        with contextlib.ExitStack() as ends:
            with contextlib.chdir(job_directory):
                cluster = ends.enter_context(RayCluster(settings(), "cpu"))
            yield cluster
