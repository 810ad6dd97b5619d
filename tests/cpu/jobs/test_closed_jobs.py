"""Whole jobs that strangers reach for, that lose a part, or that are signalled at any moment."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import psutil
import pytest

from tests.support.forks import ForkedCommand
from tests.support.jobs import (
    environment,
    family,
    kill_all,
    left_running,
    members,
    metrics,
    start_forked_job,
    start_job,
    wait_until,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

BASE = [
    "rollout=transformers",
    "trainer.val_interval=-1",
    "logger.plot=false",
    "trainer.total_steps=500",
    "trainer.ckpt_interval=-1",
]
INTRUDER = """
import sys, ray
try:
    ray.init(address=sys.argv[1], log_to_driver=False)
except ConnectionError:
    sys.exit(7)
ray.get(ray.remote(lambda: 0).remote(), timeout=20)
"""


def reach(job: subprocess.Popen | ForkedCommand, text: str, output: str = "") -> str:
    """Read the job's output up to a line that holds `text`; returns all of it, with what was read before."""
    for line in job.stdout:
        output += line
        if text in " ".join(line.split()):
            return output
    raise AssertionError(output)


def end(job: subprocess.Popen | ForkedCommand, output: str, timeout: float = 60) -> tuple[int, str]:
    try:
        output += job.communicate(timeout=timeout)[0]
        return job.returncode, output
    finally:
        if job.poll() is None:
            kill_all(family(job.pid))


def listeners(job: subprocess.Popen) -> dict[tuple[str, int], str]:
    """Addresses on which any process of the job listens, with the process's name."""
    found = {}
    for process in family(job.pid):
        for connection in process.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN:
                found[(connection.laddr.ip, connection.laddr.port)] = process.name()
    return found


def ray_directory(job: subprocess.Popen) -> Path:
    """What holds the sockets and logs of the job's Ray."""
    raylet = next(p for p in family(job.pid) if p.name() == "raylet")
    socket = next(arg for arg in raylet.cmdline() if arg.startswith("--raylet_socket_name="))
    return Path(socket.partition("=")[2].partition("/ray/")[0])


def intrude(port: int, **env: str) -> subprocess.Popen:
    """A Ray client of the same machine that wants to run a task."""
    without = {name: value for name, value in environment().items() if not name.startswith("RAY_")}
    return subprocess.Popen(
        [sys.executable, "-c", INTRUDER, f"127.0.0.1:{port}"],
        env={**without, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


class Executed:
    """Whoever loads a pickle of it makes a directory."""

    def __init__(self, path: Path):
        self.path = str(path)

    def __reduce__(self) -> tuple:
        return os.mkdir, (self.path,)


def disturb(ports: Iterable[int], executed: Path) -> list[socket.socket]:
    """Send each port what no protocol allows, and leave connections open that say nothing."""
    pickled = pickle.dumps(Executed(executed))
    texts = [os.urandom(4096), bytes(4096), b"\xff" * 4096, b"GET / HTTP/1.1\r\n\r\n", pickled, *[b""] * 20]
    connections = []
    for port in ports:
        for text in texts:
            with contextlib.suppress(OSError):  # it was closed at the other end
                connections.append(socket.create_connection(("127.0.0.1", port), timeout=5))
                connections[-1].sendall(text)
    return connections


@pytest.mark.release
def test_a_job_is_closed_to_strangers_and_a_signal_to_its_process_group_stops_it(tmp_path, marker):
    """It listens on loopback alone and refuses clients without its token; what else strangers send disturbs no step and
    runs nothing. SIGTERM to the process group, as `timeout`
    and schedulers send it, reaches every process that shares the driver's group; the job saves and exits with 75.
    """
    job = start_job(*BASE, "trainer.num_workers=2", cwd=tmp_path)
    output = reach(job, "step 1/500")
    try:
        found = listeners(job)
        assert {"gcs_server", "raylet"} <= set(found.values())
        outside = {ip for ip, _ in found if not ipaddress.ip_address(ip.removeprefix("::ffff:")).is_loopback}
        assert outside == set(), found
        port = next(port for (_, port), name in found.items() if name == "gcs_server")
        intruders = [
            intrude(port, RAY_AUTH_MODE="disabled"),
            intrude(port, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="0" * 64),
        ]
        for intruder in intruders:
            text, _ = intruder.communicate(timeout=300)
            assert intruder.returncode == 7 and "InvalidAuthToken" in text, text
        assert ray_directory(job).stat().st_mode & 0o077 == 0, "other users can enter it"
        connections = disturb([port for _, port in found], tmp_path / "executed")
        assert len(connections) > 100
        log = tmp_path / "outputs/default/metrics.jsonl"
        logged = log.read_bytes().count(b"\n")
        wait_until(lambda: log.read_bytes().count(b"\n") > logged + 3 or job.poll() is not None)
        assert job.poll() is None and not (tmp_path / "executed").exists()
    finally:
        os.killpg(job.pid, signal.SIGTERM)
        status, output = end(job, output)
    assert status == 75 and "stopped after step" in output.strip().splitlines()[-1], output
    last = metrics(tmp_path / "outputs/default")[-1]
    assert last["reward/failures"] == 0
    assert (tmp_path / f"outputs/default/checkpoints/global_step_{last['step']}/manifest.json").exists()
    assert left_running(marker) == []


def test_an_engine_that_stands_still_ends_a_job_without_restarts(tmp_path, marker):
    env = {"TRAINER_TIME_LIMITS": "HEARTBEAT_S=3"}
    job = start_forked_job(*BASE, "trainer.max_restarts=0", cwd=tmp_path, env=env)
    output = reach(job, "step 1/500")
    _, engine = members(job.pid)
    engine.send_signal(signal.SIGSTOP)
    status, output = end(job, output, timeout=300)
    assert status == 1, output
    sentence = output.strip().splitlines()[-1]
    assert f"process {engine.pid} on" in sentence and "its process or its machine hangs" in sentence, output
    assert "Traceback" not in output
    assert left_running(marker) == []


def test_a_request_to_stop_is_heard_while_a_rank_stands_still(tmp_path, marker):
    job = start_forked_job(*BASE, "trainer.num_workers=2", cwd=tmp_path)
    output = reach(job, "step 1/500")
    rank, *_ = members(job.pid)
    rank.send_signal(signal.SIGSTOP)
    job.send_signal(signal.SIGTERM)
    status, output = end(job, output, timeout=300)
    assert status == 75, output
    assert "did not answer" in output.strip().splitlines()[-1] and f"process {rank.pid} on" in output
    assert left_running(marker) == []


def handles_signals(job: subprocess.Popen) -> bool:
    caught = next(line for line in Path(f"/proc/{job.pid}/status").read_text().splitlines() if "SigCgt" in line)
    return bool(int(caught.split()[1], 16) >> (signal.SIGUSR1 - 1) & 1)


def runs(job: subprocess.Popen, name: str) -> bool:
    """Whether a process of the job has this name."""
    for process in family(job.pid):
        with contextlib.suppress(psutil.Error):  # it has just ended
            if process.name() == name:
                return True
    return False


MOMENTS = {
    "the first one": (signal.SIGUSR1, handles_signals),
    "ray starts": (signal.SIGTERM, lambda job: runs(job, "gcs_server")),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_signal_while_the_job_starts_exits_75_with_one_message(moment, tmp_path, marker):
    number, has_come = MOMENTS[moment]
    job = start_job(*BASE, cwd=tmp_path)
    try:
        while not has_come(job):
            assert job.poll() is None
            time.sleep(0.02)
    finally:
        job.send_signal(number)
        status, output = end(job, "")
    assert status == 75, output
    assert "stopped by" in output.strip().splitlines()[-1] and "Traceback" not in output, output
    assert left_running(marker) == []
