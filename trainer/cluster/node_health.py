"""Detects failed nodes of a cluster within seconds. Ray's own health check takes about a minute."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass

from trainer.process import time_limits
from trainer.process.signals import SIGNALS

_MAX_REFUSALS = 3  # refused connections in a row after which the node counts as failed
_EXITED = "its raylet has exited"


@dataclass(frozen=True)
class Node:
    id: str
    address: str
    port: int  # TCP port of its raylet

    def __str__(self) -> str:
        return self.address


@dataclass
class _Record:
    answered_at: float  # when the machine last answered, on the monotonic clock
    refusals: int = 0
    judged_at: float = 0.0  # when the last completed round of connections began


class NodeHealth:
    """Connects to the raylets of the watched nodes again and again, on its own thread.

    The kernel accepts a connection even while the raylet or the whole machine is busy. So only a node that is cut off,
    frozen or switched off does not answer. A node whose raylet has died refuses the connection. A node counts as failed
    after `limit_s` without a connection.
    """

    def __init__(self, limit_s: float):
        self._limit_s = limit_s
        self._records: dict[Node, _Record] = {}
        self._failed: dict[Node, str] = {}
        self._end = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="node health", daemon=True)
        with SIGNALS.blocked():
            self._thread.start()

    def watch(self, nodes: Iterable[Node]) -> None:
        now = time.monotonic()
        self._records = {node: self._records.get(node) or _Record(now) for node in nodes}

    def failed(self) -> dict[Node, str]:
        """Return the watched nodes that have failed now, each with the reason."""
        return {node: reason for node, reason in list(self._failed.items()) if node in self._records}

    def check(self) -> dict[Node, str]:
        """Wait until each watched node has answered or failed, then return `failed()`. Takes a second, or the limit."""
        since, records = time.monotonic(), self._records
        while not all(
            record.judged_at >= since and (record.answered_at >= since or node in self._failed)
            for node, record in list(records.items())
        ):
            SIGNALS.check()
            time.sleep(time_limits.NODE_CHECK_INTERVAL_S / 5)
        return self.failed()

    def has_exited(self, node_id: str) -> bool:
        """Return whether the raylet of a node has exited. Ray may have dropped the node since."""
        return any(node.id == node_id and reason == _EXITED for node, reason in list(self._failed.items()))

    def close(self) -> None:
        self._end.set()
        self._thread.join()

    async def _run(self) -> None:
        while not self._end.is_set():
            records, began = self._records, time.monotonic()
            await asyncio.gather(*(self._connect(node, record) for node, record in records.items()))
            for record in records.values():
                record.judged_at = began
            await asyncio.sleep(time_limits.NODE_CHECK_INTERVAL_S)

    async def _connect(self, node: Node, record: _Record) -> None:
        try:
            async with asyncio.timeout(self._limit_s / 3):
                _, writer = await asyncio.open_connection(node.address, node.port)
        except ConnectionRefusedError:
            record.answered_at = time.monotonic()
            record.refusals += 1
        except OSError:  # no route, or a timeout
            pass
        else:
            record.answered_at, record.refusals = time.monotonic(), 0
            writer.close()
        age_s = time.monotonic() - record.answered_at
        if record.refusals < _MAX_REFUSALS and age_s <= self._limit_s:
            self._failed.pop(node, None)
            return
        has_exited = record.refusals >= _MAX_REFUSALS
        self._failed[node] = _EXITED if has_exited else f"it has not answered for {age_s:.0f} s"
