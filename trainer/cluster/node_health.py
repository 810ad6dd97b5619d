"""Notices in seconds that a node of a cluster is lost. Ray's own health check takes about a minute."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from trainer.process.signals import SIGNALS

_POLL_INTERVAL_S = 1.0  # between two rounds of connections
_REFUSALS = 3  # refused connections in a row after which the node counts as lost


@dataclass(frozen=True)
class Node:
    """A node of a Ray cluster."""

    id: str
    address: str
    """IP address of the node."""
    port: int
    """TCP port of its raylet."""

    def __str__(self) -> str:
        return self.address


@dataclass
class _Record:
    """What the last connections to a node gave."""

    heard: float
    """When the machine last answered, on the monotonic clock."""
    refusals: int = 0
    judged: float = 0.0
    """When the last round of connections began after which the node was judged."""


class NodeHealth:
    """Connects to the raylets of the watched nodes, again and again, on a thread of its own.

    The kernel accepts a connection even while the raylet or the whole machine is busy, so only a node that is cut off,
    frozen or gone does not answer. A node whose raylet has died refuses the connection.

    If several other nodes stop answering and none is left that does, this machine is cut off, and not they. Then they
    are lost, but the losses do not count.

    Args:
        limit_s: seconds without a connection after which a node counts as lost.
        own: address of this machine.
    """

    def __init__(self, limit_s: float, own: str = ""):
        self._limit_s = limit_s
        self._own = own
        self._records: dict[Node, _Record] = {}
        self._lost: dict[Node, str] = {}
        self._losses: Counter[str] = Counter()
        self._counted: set[Node] = set()  # those that are lost now and whose loss counts
        self._end = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="node watch", daemon=True)
        with SIGNALS.blocked():
            self._thread.start()

    def watch(self, nodes: Iterable[Node]) -> None:
        """Watch these nodes, instead of those before."""
        now = time.monotonic()
        self._records = {node: self._records.get(node) or _Record(now) for node in nodes}

    def lost(self) -> dict[Node, str]:
        """Return the watched nodes that are lost now, each with the reason."""
        return {node: reason for node, reason in list(self._lost.items()) if node in self._records}

    def look(self) -> dict[Node, str]:
        """Return what `lost` returns once every watched node has answered or is lost. Takes a second, or the limit."""
        since, records = time.monotonic(), self._records
        while not all(
            record.judged >= since and (record.heard >= since or node in self._lost)
            for node, record in list(records.items())
        ):
            SIGNALS.check()
            time.sleep(_POLL_INTERVAL_S / 5)
        return self.lost()

    def losses(self, address: str) -> int:
        """Return how often a node with this address was lost while another one answered."""
        return self._losses[address]

    def close(self) -> None:
        """End the thread."""
        self._end.set()
        self._thread.join()

    async def _run(self) -> None:
        while not self._end.is_set():
            records, began = self._records, time.monotonic()
            await asyncio.gather(*(self._connect(node, record) for node, record in records.items()))
            for node, record in records.items():
                self._judge(node, record)
                record.judged = began
            self._forgive(records)
            await asyncio.sleep(_POLL_INTERVAL_S)

    async def _connect(self, node: Node, record: _Record) -> None:
        try:
            async with asyncio.timeout(self._limit_s / 3):
                _, writer = await asyncio.open_connection(node.address, node.port)
        except ConnectionRefusedError:
            record.heard = time.monotonic()
            record.refusals += 1
        except OSError:  # no route, or a timeout
            pass
        else:
            record.heard, record.refusals = time.monotonic(), 0
            writer.close()

    def _forgive(self, records: Mapping[Node, _Record]) -> None:
        """Take back the losses if this machine is cut off."""
        now, others = time.monotonic(), {node for node in records if node.address != self._own}
        if len(others) > 1 and all(now - records[node].heard > self._limit_s for node in others):
            self._losses.subtract(node.address for node in others & self._counted)
            self._counted -= others

    def _judge(self, node: Node, record: _Record) -> None:
        silence_s = time.monotonic() - record.heard
        if record.refusals < _REFUSALS and silence_s <= self._limit_s:
            self._lost.pop(node, None)
            self._counted.discard(node)
            return
        if node not in self._lost:
            self._losses[node.address] += 1
            self._counted.add(node)
        gone = record.refusals >= _REFUSALS
        self._lost[node] = "its raylet is gone" if gone else f"it has not answered for {silence_s:.0f} s"
