"""One Ray of this process for all tests of the package."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from trainer.cluster.ray_cluster import RayCluster
from trainer.config import Config


def settings() -> Config:
    """Ray has capacity for two ranks and three engines, which suffices for the two groups of a test."""
    cfg = Config()
    cfg.trainer.num_workers, cfg.rollout.num_engines = 2, 3
    return cfg


@pytest.fixture(scope="package")
def ray_cluster() -> Iterator[RayCluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", "/tmp")  # pytest's own paths are too long for sockets
        with RayCluster(settings(), "cpu") as cluster:
            yield cluster
