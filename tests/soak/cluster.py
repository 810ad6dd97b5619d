"""The Ray cluster of one round: nodes made of namespaces, of which some are lost while others join."""

from __future__ import annotations

import contextlib
import time

import psutil
import pytest

from tests.support.jobs import command_of
from tests.support.nodes import Node, Nodes

_SLOTS = 4  # two ranks, an engine and a spare one
_GRACE_PERIOD_S = 60.0
_HEALTH_CHECKS = ("RAY_health_check_failure_threshold", "3")  # a lost driver holds its CPUs until Ray notices


class Cluster(contextlib.ExitStack):
    """A head, nodes with a CPU each, and a node for the driver, for as long as the block runs.

    The head has no CPU and is never lost, because it holds what Ray knows of the cluster.
    """

    def __enter__(self) -> Cluster:
        super().__enter__()
        self.enter_context(pytest.MonkeyPatch.context()).setenv(*_HEALTH_CHECKS)
        self._made = self.enter_context(Nodes())
        self.head, *nodes, self._driver = self._made.cluster(1 + _SLOTS + 1, cpus=[0, *[1] * _SLOTS, 0])
        self.nodes = [*nodes, self._driver]
        return self

    @property
    def has_driver(self) -> bool:
        """Whether the node of the last driver was not lost."""
        return self._driver in self.nodes

    @property
    def driver(self) -> Node:
        """The node on which the next driver starts: a new one if the one before was lost."""
        if not self.has_driver:
            self._driver = self.add(cpus=0)
        return self._driver

    def add(self, cpus: int = 1) -> Node:
        """Let a new node join."""
        node = self._made.add()
        node.start_ray(self.head, cpus)
        self.nodes.append(node)
        return node

    def lose(self, node: Node) -> None:
        """Let a node lose its power."""
        self.nodes.remove(node)
        node.lose()

    def hosts(self) -> list[Node]:
        """Return the nodes that host ranks or engines."""
        return [node for node in self.nodes if _members(node)]

    def members(self) -> list[psutil.Process]:
        """Return the ranks and engines of all nodes that are left."""
        return [process for node in self.nodes for process in _members(node)]

    def left(self) -> list[str]:
        """Wait until no rank or engine is left of a job that has ended; return what stays."""
        end = time.monotonic() + _GRACE_PERIOD_S
        while (found := self.members()) and time.monotonic() < end:
            time.sleep(0.5)
        return [f"{process.pid} {process.status()}" for process in found]


def refusal() -> str:
    """Return why this machine permits no such nodes; empty if it does."""
    try:
        with Nodes() as nodes:
            nodes.add().slow_down(1)
    except (OSError, pytest.skip.Exception) as error:
        return str(error)
    return ""


def _members(node: Node) -> list[psutil.Process]:
    return [process for process in node.processes() if "ray::Host" in command_of(process)]
