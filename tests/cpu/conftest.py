"""Fixtures that several test files share."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

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
    base = tmp_path_factory.getbasetemp()
    # One for all processes of the test run: who comes second waits for the first, and takes what it has made.
    patch.setenv("TRAINER_CACHE", str((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cache"))
    patch.setenv("OMP_NUM_THREADS", "1")
    yield
    patch.undo()


@pytest.fixture(scope="session")
def ray_address():
    """A Ray cluster that jobs join, as on several nodes; it outlives them."""
    directory = tempfile.mkdtemp(prefix="ray")  # Ray's sockets need a short path
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", f"--port={port}",
               "--node-ip-address=127.0.0.1", "--num-cpus=8", f"--object-store-memory={2**28}",
               "--include-dashboard=false", f"--temp-dir={directory}"]  # fmt: skip
    env = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    env.pop("TRAINER_TEST_MARKER", None)  # it belongs to the test that happens to be first
    with open(f"{directory}/log", "w") as log:
        cluster = subprocess.Popen(command, stdout=log, stderr=log, env=env)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                assert cluster.poll() is None and time.monotonic() < deadline, Path(f"{directory}/log").read_text()
                time.sleep(0.2)
        yield f"127.0.0.1:{port}"
    finally:
        cluster.terminate()
        cluster.wait(60)
        shutil.rmtree(directory, ignore_errors=True)
