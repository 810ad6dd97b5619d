"""What a job's Ray has started, and its end."""

from __future__ import annotations

import dataclasses
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import ray
import torch

from tests.cpu.jobs import left_running
from trainer.cluster import groups
from trainer.cluster.runtime import Cluster
from trainer.cluster.supervisor import end_all, is_running
from trainer.config import Config
from trainer.errors import WorkerError


def test_a_zombie_has_ended():
    """In a container whose first process reaps nobody, what has ended stays a zombie."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    process = psutil.Process(child.pid)
    assert is_running(process)
    end_all([process])
    while process.status() != psutil.STATUS_ZOMBIE:
        pass
    assert not is_running(process)
    child.wait()
    assert not is_running(process)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", "/tmp")  # pytest's own paths are too long for sockets
        limits = dataclasses.replace(Config().trainer, silence_timeout_s=10.0)
        with Cluster(dataclasses.replace(Config(), trainer=limits), "cpu") as cluster:
            yield cluster


class Victim:
    """What a rank's process may meet."""

    def __init__(self, *_: object):
        pass

    def is_killed(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def wants_a_tensor(self) -> None:
        self._limit()
        torch.zeros(10**9)

    def wants_bytes(self) -> None:
        self._limit()
        bytearray(10**9)

    def pid(self) -> int:
        return os.getpid()

    def waits(self, seconds: float = 600) -> str:
        time.sleep(seconds)
        return "waited"

    def waits_a_little(self) -> str:
        return self.waits(1)

    def fills_the_gpu(self) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has 1 GiB free")

    @staticmethod
    def _limit() -> None:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, used + 2**28))


@pytest.mark.parametrize("end", ["is_killed", "wants_a_tensor", "wants_bytes", "fills_the_gpu"])
def test_a_rank_without_memory_is_one_sentence(end, cluster, capfd):
    group = cluster.launch_ranks("rank", Victim, {})
    with pytest.raises(WorkerError) as raised:
        group.call(end)
    cluster.release(group)
    text = str(raised.value)
    assert text.startswith("rank 0 ") and "\n" not in text, text
    assert "memory" in text and "the same command" in text
    assert capfd.readouterr() == ("", ""), "Ray tells it too, on a page"


def test_a_save_and_the_loop_can_watch_an_actor_at_the_same_time(cluster, monkeypatch):
    monkeypatch.setattr(groups, "_LOOK_S", 0.0)
    monkeypatch.setattr(groups, "_PULSE_S", 0.0)
    group = cluster.launch_ranks("rank", Victim, {})
    calls = [group.start("waits", 3.0), *(group.start_aside("waits_a_little") for _ in range(3))]
    with ThreadPoolExecutor() as threads:
        assert list(threads.map(lambda call: call.result(), calls)) == [["waited"]] * 4
    cluster.release(group)


class SlowToLoad(Victim):
    def __init__(self, *_: object):
        time.sleep(8)


def test_a_rank_that_does_not_start_is_named(cluster, monkeypatch, caplog):
    monkeypatch.setattr(groups, "_SAY_START_S", 1.0)
    group = cluster.launch_ranks("slow rank", SlowToLoad, {})
    group.call("waits", 0.0)
    cluster.release(group)
    (warning,) = [record.getMessage() for record in caplog.records if "has not started" in record.getMessage()]
    assert warning.startswith("slow rank 0") and "; the job ends after" in warning, warning


def test_a_rank_that_stands_still_after_quick_calls_is_named(cluster):
    """While calls are quick, the driver has no reason to ask whether the rank still answers."""
    group = cluster.launch_ranks("rank", Victim, {})
    pid = group.call("pid")[0]
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(WorkerError, match=rf"rank 0 .process {pid} on .* has not answered for .*silence_timeout_s"):
            group.call("pid")
    finally:
        os.kill(pid, signal.SIGCONT)
        cluster.release(group)


JOINS = """
import dataclasses, sys
from trainer.cluster.runtime import Cluster
from trainer.config import Config
from trainer.errors import UserError
cfg = Config()
cfg = dataclasses.replace(cfg, trainer=dataclasses.replace(cfg.trainer, ray_address=sys.argv[1]))
try:
    with Cluster(cfg, "cpu"):
        print("joined")
except UserError as error:
    print(error)
"""


@pytest.mark.parametrize("token", [None, "", "0" * 64])
def test_a_cluster_that_wants_a_token_is_named_without_it(token, cluster, tmp_path):
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    env |= {"HOME": str(tmp_path), "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    if token is not None:
        env["RAY_AUTH_MODE"] = "token"
    if token:
        env["RAY_AUTH_TOKEN"] = token
    address = ray.get_runtime_context().gcs_address
    command = [sys.executable, "-c", JOINS, address]
    joined = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)
    assert joined.stdout.startswith(f"trainer.ray_address={address}: the cluster wants a token"), joined
    assert joined.stdout.count("\n") == 1


LOSES_RAY = """
import sys
import numpy as np
from tests.cpu.jobs import left_running
from trainer.cluster.runtime import Cluster
from trainer.config import Config
from trainer.errors import WorkerError
with Cluster(Config(), "cpu") as cluster:
    cluster._local._daemons[sys.argv[1]].kill()
    try:
        while True:
            cluster.put(np.zeros(10**6))
    except WorkerError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
"""


def test_a_driver_that_ray_ends_leaves_a_sentence(marker):
    """Ray ends the process in C++ when it stores a batch and the store has gone with the raylet."""
    done = subprocess.run([sys.executable, "-c", LOSES_RAY, "raylet"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "Ray's raylet died" in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
    assert left_running(marker) == []


LOSES_THE_GCS = """
import sys
from trainer.cluster.runtime import Cluster
from trainer.cluster.supervisor import is_running
from trainer.config import Config
from trainer.errors import WorkerError
try:
    with Cluster(Config(), "cpu") as cluster:
        daemon = cluster._local._daemons["gcs_server"]
        daemon.kill()
        while is_running(daemon):
            pass
        cluster.launch_ranks("rank", object, {})
except WorkerError as error:
    sys.exit(str(error))
"""


def test_no_place_is_asked_of_a_ray_that_has_died():
    """Ray would wait for a minute, and then end this process."""
    done = subprocess.run([sys.executable, "-c", LOSES_THE_GCS], stderr=subprocess.PIPE, text=True, timeout=180)
    assert done.stderr.startswith("Ray's gcs_server died, and the job with it"), done.stderr


MEMORY_RUNS_LOW = """
from tests.cpu.test_cluster import Victim
from trainer.cluster.runtime import Cluster
from trainer.config import Config
from trainer.errors import WorkerError
with Cluster(Config(), "cpu") as cluster:
    try:
        cluster.launch_ranks("rank", Victim, {}).call("waits")
    except WorkerError as error:
        print(f"error: {error}")
"""


def test_a_rank_that_ray_ends_because_memory_runs_low_is_one_sentence(monkeypatch):
    monkeypatch.setenv("RAY_memory_usage_threshold", "0.01")
    monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "100")
    done = subprocess.run([sys.executable, "-c", MEMORY_RUNS_LOW], capture_output=True, text=True, timeout=120)
    assert done.stderr == "" and len(done.stdout.splitlines()) == 1, done
    assert "rank 0 died: Ray ended it, because the memory of its machine ran low" in done.stdout
