"""Joining Ray, and the end of what a job's Ray has started."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import ray

from tests.cpu.unit.cluster.hosted import Host
from tests.support.jobs import left_running, wait_until
from trainer.cluster.ray_cluster import create_placement_group, exclude_nodes, remove_groups


def environment(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "RAY_TMPDIR": "/tmp", "TRAINER_TEST_MARKER": str(tmp_path)}


JOINS = """
import dataclasses, os, sys
from trainer.cluster.ray_cluster import RayCluster
from trainer.config import Config
from trainer.errors import UserError
cfg = Config()
cfg = dataclasses.replace(cfg, trainer=dataclasses.replace(cfg.trainer, ray_address=sys.argv[1]))
for token in ({}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}):
    os.environ.update(token)
    try:
        with RayCluster(cfg, "cpu"):
            print("joined")
    except UserError as error:
        print(error)
"""


def test_a_cluster_that_wants_a_token_is_named_without_it(ray_cluster, tmp_path):
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    env |= {"HOME": str(tmp_path), "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    address = ray.get_runtime_context().gcs_address
    command = [sys.executable, "-c", JOINS, address]
    joined = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)
    lines = joined.stdout.splitlines()
    assert len(lines) == 2, joined
    assert all(line.startswith(f"trainer.ray_address={address}: the cluster requires a token") for line in lines)


WAITS_FOR_NODES = """
import dataclasses, sys
from trainer.cluster.ray_cluster import RayCluster
from trainer.config import Config
from trainer.errors import UserError
for timeout_s in (None, 0.5):
    trainer = dataclasses.replace(
        Config().trainer, ray_address=sys.argv[1], num_workers=1000, placement_timeout_s=timeout_s
    )
    try:
        with RayCluster(Config(trainer=trainer), "cpu") as cluster:
            cluster.launch_ranks("rank", object, {})
    except UserError as error:
        print(error)
"""


DRAINS = """
import sys
import ray
from trainer.cluster import ray_cluster
from trainer.process import time_limits
from trainer.config import compose
from trainer.errors import FailureSource, UserError, set_failure_source

time_limits.PLACEMENT_S = 0.5
address, own = sys.argv[1:]
cfg = compose([f"trainer.ray_address={address}", "trainer.min_world_size=1", "trainer.excluded_nodes=[10.0.0.7]"])
error = RuntimeError("CUDA error: uncorrectable ECC error encountered")
set_failure_source(error, FailureSource("rank 0", own))
with ray_cluster.RayCluster(cfg, "cpu") as cluster:
    print(cluster.count_ranks())
    cluster.drain(error)
    try:
        cluster.count_ranks()
    except UserError as refused:
        print(refused)
    cfg.trainer.excluded_nodes = [own]
    other = ray_cluster.RayCluster(cfg, "cpu")
    other._node_health = cluster._node_health
    print(other._excluded_nodes() == {ray.nodes()[0]["NodeID"]: "trainer.excluded_nodes contains it"})
"""


LATE = """
import logging, sys
import ray
from trainer.cluster.ray_cluster import create_placement_group, remove_groups
from trainer.cluster.ray_cluster import LOG, RayCluster
from trainer.config import compose
from trainer.process import time_limits

time_limits.CAPACITY_WAIT_S = 0.5
address, timeout_s = sys.argv[1:]
keys = [f"trainer.ray_address={address}", f"trainer.placement_timeout_s={timeout_s}"]
cfg = compose([*keys, "trainer.num_workers=2", "trainer.min_world_size=1"])
logging.basicConfig(level="INFO", stream=sys.stdout, format="%(message)s")

def join(record):
    if is_first and timeout_s != "null" and "waiting" in record.msg:
        remove_groups([group])
    return True

LOG.addFilter(join)
with RayCluster(cfg, "cpu") as cluster:
    for is_first in (True, False):
        group = create_placement_group([{"CPU": 1}] * (int(ray.cluster_resources()["CPU"]) - 2), {})
        assert group.wait(60)
        print(cluster.count_ranks())
        remove_groups([group])
"""


ASKS = """
import sys, threading, time
import ray
from ray._raylet import GcsClient
from ray.autoscaler.v2.sdk import get_cluster_resource_state
from trainer.cluster.ray_cluster import create_placement_group, remove_groups
from trainer.cluster.ray_cluster import RayCluster
from trainer.config import compose

address = sys.argv[1]
keys = [f"trainer.ray_address={address}", "trainer.placement_timeout_s=10000"]
cfg = compose([*keys, "trainer.num_workers=2", "trainer.min_world_size=1"])

def asked():
    state = get_cluster_resource_state(GcsClient(address=address))
    return [
        [dict(request.resources_bundle) for request in one.requests] or
        [dict(request.resources_bundle) for selector in one.bundle_selectors for request in selector.resource_requests]
        for one in state.pending_gang_resource_requests
    ]

def add_node_once_asked():
    while not (seen := asked()):
        time.sleep(0.05)
    print(seen)
    remove_groups([group])

with RayCluster(cfg, "cpu") as cluster:
    group = create_placement_group([{"CPU": 1}] * (int(ray.cluster_resources()["CPU"]) - 2), {})
    assert group.wait(60)
    adding = threading.Thread(target=add_node_once_asked)
    adding.start()
    print(cluster.count_ranks())
    adding.join()
    while asked() or ray.available_resources().get("CPU") != ray.cluster_resources()["CPU"]:
        time.sleep(0.05)
    print("free")
"""


DRIVER = """
import json, sys
scripts, *arguments = json.loads(sys.argv[1]), *sys.argv[2:]
from trainer.process import time_limits
limits = {name: value for name, value in vars(time_limits).items() if name.isupper()}
for name, (script, more) in scripts.items():
    vars(time_limits).update(limits)
    sys.argv[1:] = [*arguments, *more]
    print("==", name, flush=True)
    exec(script, {"__name__": name})
"""


@pytest.fixture(scope="module")
def printed(ray_cluster) -> dict[str, list[str]]:
    """What drivers print that join the cluster one after another, in one process."""
    scripts = {
        "waits": (WAITS_FOR_NODES, []),
        "drains": (DRAINS, [ray.util.get_node_ip_address()]),
        "asks": (ASKS, []),
        "late": (LATE, ["10000"]),
    }
    command = [sys.executable, "-c", DRIVER, json.dumps(scripts), ray.get_runtime_context().gcs_address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done
    parts = re.split(r"^== (\w+)\n", done.stdout, flags=re.MULTILINE)[1:]
    return {name: text.splitlines() for name, text in zip(parts[::2], parts[1::2], strict=True)}


def test_a_cluster_that_is_too_small_may_get_more_nodes(printed):
    """Only with `placement_timeout_s`. Otherwise the job is refused before it creates placement groups."""
    address = ray.get_runtime_context().gcs_address
    at_once, later = printed["waits"]
    assert "trainer.num_workers=1000: ranks and engines need 1001 CPUs" in at_once
    assert f"trainer.ray_address={address}: the cluster has no capacity for 1000 processes with 1 CPU each" in later
    assert "within 0.5 s" in later and later.endswith("raise trainer.placement_timeout_s if nodes have not started yet")


def test_the_first_start_waits_for_late_nodes(printed):
    """A placement group has a CPU of the cluster. It stands for a node that joins while the first start waits."""
    few = "the cluster has capacity for 1 of 2 ranks: "
    lines = [line for line in printed["late"] if line.isdigit() or few in line and "up to 0.5 s" not in line]
    waiting = f"{few}waiting for more, up to 10000 s (trainer.placement_timeout_s)"
    assert lines == [waiting, "2", f"{few}starting 1", "1"], printed


def test_an_autoscaler_sees_what_a_start_that_waits_for_nodes_lacks(printed):
    """Nothing is asked for any more once the ranks can start. A group stands for a node, as above."""
    assert printed["asks"] == [str([[{"CPU": 1.0}] * 3]), "2", "free"]


def test_drained_nodes_and_nodes_with_a_broken_gpu_get_no_ranks(printed):
    count, refused, is_excluded = printed["drains"]
    assert (count, is_excluded) == ("1", "True")
    assert "has capacity for 0 ranks" in refused


def test_each_of_several_nodes_is_excluded(ray_cluster):
    group = create_placement_group([{"CPU": 1}], exclude_nodes(["0" * 56, ray.nodes()[0]["NodeID"]]))
    assert not group.wait(2)
    remove_groups([group])


def test_placement_groups_that_are_removed_early_free_their_resources(ray_cluster):
    """Ray leaks about one of 60 groups that are removed while it schedules them."""
    before = ray.available_resources()["CPU"]
    for i in range(100):
        group = create_placement_group([{"CPU": 1}], {})
        time.sleep(i % 8 / 1000)
        remove_groups([group])
    wait_until(lambda: ray.available_resources().get("CPU") == before)


def test_modules_of_the_working_directory_hide_no_others_in_a_worker(ray_cluster, job_directory, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(job_directory)])  # as the command does
    group = ray_cluster.launch_ranks("rank", Host, {}, 1)
    try:
        (path,) = group.call("import_path")
    finally:
        ray_cluster.release(group)
    assert path[-1] == str(job_directory) and path.count(path[-1]) == 1


LOSES_THE_GCS = """
from tests.cpu.unit.cluster.hosted import Host
from trainer.cluster.ray_cluster import RayCluster
from trainer.config import Config
from trainer.errors import WorkerError
with RayCluster(Config(), "cpu") as cluster:
    ranks = cluster.launch_ranks("rank", Host, {})
    call = ranks.start("waits")
    cluster._head._daemons["gcs_server"].kill()
    for wants in (call.result, lambda: cluster.launch_ranks("rank", object, {})):
        try:
            wants()
        except WorkerError as error:
            print(error)
"""


def run_as_child_of_process_1(script: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a process namespace, as an image with an init program does; without namespaces, just run it."""
    user = [] if os.geteuid() == 0 else ["--map-root-user"]
    unshare = ["unshare", *user, "--pid", "--fork", "--kill-child", "--mount-proc"]
    words = [sys.executable, "-u", "-c", script]
    if subprocess.run([*unshare, "true"], capture_output=True).returncode == 0:
        words = [*unshare, "sh", "-c", '"$@"; exit $?', "sh", *words]
    return subprocess.run(words, capture_output=True, text=True, timeout=300)


def test_the_death_of_ray_ends_a_call_and_no_placement_group_is_created_after_it(marker):
    """Ray would wait for a minute, and then end this process."""
    done = run_as_child_of_process_1(LOSES_THE_GCS)
    # Ray itself may write about its loss to stderr.
    assert "Traceback" not in done.stderr and len(done.stdout.splitlines()) == 2, done
    assert all(line.startswith("Ray's gcs_server died, and the job with it") for line in done.stdout.splitlines()), done
    assert left_running(marker) == []


IS_KILLED = """
import signal
from tests.cpu.unit.cluster.hosted import Host
from trainer.cluster.ray_cluster import RayCluster
from trainer.config import Config
with RayCluster(Config(), "cpu") as cluster:
    cluster.launch_ranks("rank", Host, {}).call("child")
    print(cluster._head.directory, flush=True)
    signal.pause()
"""


def test_a_killed_driver_takes_every_process_of_ray_with_it(marker):
    driver = subprocess.Popen([sys.executable, "-c", IS_KILLED], stdout=subprocess.PIPE, text=True)
    directory = Path(driver.stdout.readline().strip())
    everything = psutil.Process(driver.pid).children(recursive=True)
    assert directory.exists() and "raylet" in [process.name() for process in everything]
    driver.kill()
    driver.communicate()
    _, alive = psutil.wait_procs(everything, timeout=120)
    assert alive == [] and left_running(marker) == [] and not directory.exists()


MEMORY_RUNS_LOW = """
from tests.cpu.unit.cluster.hosted import Host
from trainer.cluster.ray_cluster import RayCluster
from trainer.config import Config
from trainer.errors import WorkerError
with RayCluster(Config(), "cpu") as cluster:
    try:
        cluster.launch_ranks("rank", Host, {}).call("waits")
    except WorkerError as error:
        print(f"error: {error}")
"""


def test_a_rank_that_ray_kills_for_memory_is_reported_in_one_line(monkeypatch):
    monkeypatch.setenv("RAY_memory_usage_threshold", "0.01")
    monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "100")
    done = subprocess.run([sys.executable, "-c", MEMORY_RUNS_LOW], capture_output=True, text=True, timeout=300)
    assert done.stderr == "" and len(done.stdout.splitlines()) == 1, done
    assert "rank 0 died: Ray killed it because the memory of its machine ran low" in done.stdout


SIGNALLED = """
import os, signal, threading, time
from trainer.process import time_limits
from trainer.cluster.ray_cluster import RayCluster
from trainer.config import Config
from trainer.process.signals import SIGNALS, Stopped

time_limits.SAME_REQUEST_S = 1000.0

cluster = RayCluster(Config(), "cpu")

def send_signals():
    while cluster._head is None or not cluster._head._daemons:
        time.sleep(0.001)
    while not has_stopped.wait(0.002):
        os.kill(os.getpid(), signal.SIGTERM)

has_stopped = threading.Event()
with SIGNALS.listening():
    with SIGNALS.blocked():
        sender = threading.Thread(target=send_signals)
        sender.start()
    try:
        with cluster:
            pass
    except Stopped as stopped:
        print(stopped)
    finally:
        has_stopped.set()
        sender.join()
"""


def test_signals_while_the_driver_joins_and_leaves_ray_stop_it_once(marker, tmp_path):
    """Ray's C++ part installs a handler for SIGTERM that aborts the process, and at its end the default one."""
    done = subprocess.run([sys.executable, "-c", SIGNALLED], capture_output=True, text=True, env=environment(tmp_path))
    assert (done.returncode, done.stderr) == (0, ""), done
    assert done.stdout.startswith("stopped by SIGTERM before the first step") and done.stdout.count("\n") == 1
    assert left_running(marker) == []
