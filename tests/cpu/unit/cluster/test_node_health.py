"""Losing nodes, with nodes in network namespaces of their own."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time

import pytest

from tests.support.jobs import wait_until
from tests.support.nodes import Asked, Nodes
from trainer.cluster.node_health import Node, NodeHealth, _Record

LISTEN = """
import socket, sys, time
with socket.create_server((sys.argv[1], 4711)):
    print("up", flush=True)
    time.sleep(600)
"""
WATCH = """
import sys
from trainer.cluster.node_health import Node, NodeHealth
watch = NodeHealth(limit_s=2.0)
nodes = [Node(address, address, 4711) for address in sys.argv[1:]]
watch.watch(nodes)
for line in sys.stdin:
    print({node.address: reason for node, reason in watch.failed().items()}, flush=True)
watch.close()
"""


def listen(node) -> subprocess.Popen:
    listener = subprocess.Popen(
        node.command(sys.executable, "-c", LISTEN, node.address), stdout=subprocess.PIPE, text=True
    )
    assert listener.stdout.readline() == "up\n"
    return listener


@pytest.mark.timeout(900)
@pytest.mark.release
def test_a_node_that_is_cut_off_or_loses_its_raylet_is_lost():
    with Nodes() as nodes:
        driver, first, second = (nodes.add() for _ in range(3))
        for node in (first, second):
            listen(node)
        watch = Asked(driver.command(sys.executable, "-c", WATCH, first.address, second.address))
        assert watch.says() == "{}"
        driver.cut()
        wait_until(lambda: watch.says().count("it has not answered for") == 2)
        driver.mend()
        wait_until(lambda: watch.says() == "{}")
        first.cut()
        wait_until(lambda: watch.says() != "{}")
        assert watch.says().startswith(f"{{'{first.address}': 'it has not answered for")
        first.mend()
        wait_until(lambda: watch.says() == "{}")
        for process in second.processes():
            process.kill()
        wait_until(lambda: watch.says() != "{}")
        assert watch.says() == f"{{'{second.address}': 'its raylet has exited'}}"
        first.lose()
        wait_until(lambda: watch.says().count(":") == 2)
        watch.end()


def test_nodes_that_are_no_longer_watched_do_not_count_as_failed():
    gone = Node("a", "127.0.0.1", 1)
    watch = NodeHealth(limit_s=60.0)
    watch.watch([gone])
    wait_until(lambda: watch.failed() == {gone: "its raylet has exited"})
    watch.watch([])
    assert watch.failed() == {}
    watch.close()


def test_a_raylet_that_has_exited_has_done_so_also_when_ray_has_dropped_its_node():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        own = Node("own", "127.0.0.1", closed.getsockname()[1])  # a free port
    watch = NodeHealth(limit_s=30.0)
    watch.watch([own])
    wait_until(lambda: watch.has_exited("own"))
    watch.watch([])
    assert watch.has_exited("own")
    watch.close()


def test_single_refused_connections_are_no_failure():
    """Only refusals in a row count. The thread of `NodeHealth` opens no connections here."""
    watch = NodeHealth(limit_s=60.0)
    with socket.create_server(("127.0.0.1", 0)) as raylet:
        port = raylet.getsockname()[1]
    node, record = Node("a", "127.0.0.1", port), _Record(answered_at=time.monotonic())

    def connect() -> None:
        asyncio.run(watch._connect(node, record))

    for _ in range(3):
        connect()
        connect()
        with socket.create_server(("127.0.0.1", port)):
            connect()
    assert not watch._failed
    for _ in range(3):
        connect()
    assert set(watch._failed) == {node}
    watch.close()
