"""Fixtures that several test files share."""

from __future__ import annotations

import pytest

# Whole jobs first, so that no process of the test run is left with minutes of them at the end.
FIRST = ("test_killed_jobs", "test_jobs", "test_life_of_a_job", "test_kills", "test_rollout")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def rank(item: pytest.Item) -> int:
        name = item.path.stem
        return FIRST.index(name) if name in FIRST else len(FIRST)

    items.sort(key=rank)


@pytest.fixture
def marker(monkeypatch, tmp_path) -> str:
    """A value in the environment of everything that the test starts."""
    monkeypatch.setenv("TRAINER_TEST_MARKER", str(tmp_path))
    return str(tmp_path)


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory):
    """Embedded models are built once per test session, not taken from, or left in, the user's cache."""
    patch = pytest.MonkeyPatch()
    patch.setenv("TRAINER_CACHE", str(tmp_path_factory.mktemp("cache")))
    patch.setenv("OMP_NUM_THREADS", "1")
    yield
    patch.undo()
