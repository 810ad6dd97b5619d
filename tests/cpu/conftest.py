"""Fixtures that several test files share."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory):
    """Embedded models are built once per test session, not taken from, or left in, the user's cache."""
    patch = pytest.MonkeyPatch()
    patch.setenv("TRAINER_CACHE", str(tmp_path_factory.mktemp("cache")))
    patch.setenv("OMP_NUM_THREADS", "1")
    yield
    patch.undo()
