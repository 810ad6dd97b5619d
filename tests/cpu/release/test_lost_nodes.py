"""Engines of nodes that are cut off, on a Ray cluster of several nodes."""

from __future__ import annotations

import sys

import pytest

from tests.support.nodes import Asked, Nodes

pytestmark = pytest.mark.slow

ENGINES = """
import sys
import threading
import time
import ray
from ray.util.placement_group import placement_group_table
from tests.cpu.unit.cluster.hosted import Host
from trainer.cluster.ray_cluster import RayCluster
from trainer.config import Config
from trainer.errors import WorkerError
from trainer.process import time_limits
cfg = Config()
cfg.trainer.ray_address, time_limits.NODE_ANSWER_S = sys.argv[1], 2.0

def replace(engine):
    try:
        while True:
            group.call_one(engine, "waits")
    except WorkerError as error:
        assert error.cause == "node", error
    group.end(engine)
    group.replace(engine)

with RayCluster(cfg, "cpu") as cluster:
    group = cluster.launch_engines(Host, [()] * 2, {})
    print(*(placement["host"] for placement in group.placements()), flush=True)
    input()
    replace(0)
    alive = sum(node["Alive"] for node in ray.nodes())
    print(*(placement["host"] for placement in group.placements()), alive, cluster.has_capacity(group), flush=True)
    input()
    replace(1)
    print(cluster.has_capacity(group), flush=True)
    input()
    replace(0)
    print(cluster.has_capacity(group), flush=True)

    while not cluster.has_capacity(group):
        time.sleep(0.1)
    print("room", flush=True)
    input()
    cluster.release(group)
    while len(cluster._failed_nodes()) < 3:
        time.sleep(0.1)
    before = set(placement_group_table())

    def say_when_asked():
        while set(placement_group_table()) == before:
            time.sleep(0.1)
        print("asked", flush=True)

    threading.Thread(target=say_when_asked).start()
    print(cluster.launch_ranks("rank", Host, {}, 1).placements()[0]["host"], flush=True)
"""


@pytest.mark.timeout(900)
def test_an_engine_of_a_failed_node_starts_on_another_node_before_ray_notices(monkeypatch):
    monkeypatch.setenv("RAY_health_check_failure_threshold", "100")  # or Ray ends a node that is cut off for long
    with Nodes() as nodes:
        head, *others = nodes.cluster(4, cpus=[0, 1, 1, 1])
        by_address = {node.address: node for node in others}
        driver = Asked(head.command(sys.executable, "-c", ENGINES, head.ray_address))
        first, second = driver.reads().split()
        by_address[first].cut()
        (spare,) = set(by_address) - {first, second}
        assert driver.says() == f"{spare} {second} 4 True"
        by_address[second].cut()
        assert driver.says() == "True", "the other engine is scheduled"
        by_address[spare].cut()
        assert driver.says() == "False"
        by_address[first].mend()
        assert driver.reads() == "room", "the node answers again"
        by_address[first].cut()
        assert driver.says() == "asked"
        by_address[spare].mend()
        assert driver.reads() == spare, "the node answers again"
        driver.end()
