"""The Ray cluster of one run: its environment, and its end when it or its supervisor is closed or killed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.jobs import left_running, wait_until
from trainer.cluster.ray_head import _set_environment, check_tmpdir
from trainer.errors import UserError


def environment(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "RAY_TMPDIR": "/tmp", "RAY_USAGE_STATS_ENABLED": "0", "TRAINER_TEST_MARKER": str(tmp_path)}


def test_each_cluster_has_a_token_of_its_own_and_ignores_other_clusters(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/somewhere")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of another cluster")
    before = dict(os.environ)
    tokens = set()
    for _ in range(2):
        previous = _set_environment()
        assert os.environ["RAY_AUTH_MODE"] == "token" and len(os.environ["RAY_AUTH_TOKEN"]) == 64
        assert not {"RAY_ADDRESS", "RAY_AUTH_TOKEN_PATH"} & set(os.environ)
        tokens.add(os.environ["RAY_AUTH_TOKEN"])
        assert previous["RAY_AUTH_TOKEN"] == "of another cluster" and previous["RAY_ADDRESS"] == "10.0.0.1:6379"
        os.environ.clear()
        os.environ.update(before)
    assert len(tokens) == 2


def test_the_user_decides_whether_ray_reports_its_usage(monkeypatch):
    for given, expected in (("1", "1"), (None, "0")):
        with monkeypatch.context() as patch:
            patch.delenv("RAY_USAGE_STATS_ENABLED", raising=False)
            if given:
                patch.setenv("RAY_USAGE_STATS_ENABLED", given)
            before = dict(os.environ)
            _set_environment()
            assert os.environ["RAY_USAGE_STATS_ENABLED"] == expected
            os.environ.clear()
            os.environ.update(before)


CLOSES_EARLY = """
import sys, time
import psutil
from trainer.cluster.ray_head import RayHead

for name in sys.argv[1:]:
    local = RayHead("/tmp", 2, 2**27)
    supervisor = psutil.Process(local._supervisor.pid)
    while name not in [child.name() for child in supervisor.children()]:
        time.sleep(0.002)
    local.close()
    print(name)
"""


def test_a_ray_that_is_closed_while_it_starts_ends_without_a_word(marker, tmp_path):
    moments = ["gcs_server", "raylet"]
    command = [sys.executable, "-c", CLOSES_EARLY, *moments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(tmp_path))
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, moments, ""), done
    assert left_running(marker) == []


LOSES_SUPERVISOR = """
import contextlib
import time
import psutil
from trainer.cluster.ray_head import RayHead

local = RayHead("/tmp", 2, 2**27)
local.connect()
for child in psutil.Process(local._supervisor.pid).children():
    with contextlib.suppress(psutil.Error):
        print(child.name(), *child.cmdline())
print(flush=True)
local._supervisor.kill()
time.sleep(60)
"""


def test_the_death_of_the_supervisor_ends_the_job_with_one_message(marker, tmp_path):
    command = [sys.executable, "-c", LOSES_SUPERVISOR]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(tmp_path))
    assert done.returncode == 1
    assert "gcs_server" in done.stdout and "raylet" in done.stdout
    # Ray would wait for its dashboard. The arguments of the raylet name the agent of the dashboard.
    assert not re.search(r"monitor\.py|dashboard/dashboard\.py", done.stdout), done.stdout
    assert done.stderr == "error: Ray's supervisor died, and the job with it; restart it with the same command\n"
    wait_until(lambda: left_running(marker) == [])  # workers of Ray end when they notice


def test_a_temporary_directory_that_cannot_be_used_is_refused(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    long = tmp_path / ("d" * 100)
    for variable in ("TMPDIR", "RAY_TMPDIR"):
        monkeypatch.setenv(variable, str(long))
        with pytest.raises(UserError, match=rf"^{variable}=.*: the path is \d+ characters too long"):
            check_tmpdir()
        monkeypatch.setenv(variable, "/proc/nowhere")
        with pytest.raises(UserError, match=f"^{variable}=/proc/nowhere: .* not writable"):
            check_tmpdir()
