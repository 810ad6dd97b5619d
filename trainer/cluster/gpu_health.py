"""Whether a GPU is behind a failure of ranks: by the error itself, and by what the kernels of the nodes say."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from trainer.errors import (
    RESTART_HINT,
    FailureSource,
    UserError,
    WorkerError,
    describe_error,
    one_line,
    origin_of,
    set_origin,
)
from trainer.process.xid import gpu_error_in

_LONGEST_S = 3600.0  # a hang is noticed long after the kernel has written about it


class GpuHealthCheck:
    """Examines failures.

    Args:
        lines: returns what the kernel of each node has said of its GPUs in the last so many seconds, by the address of
            the node.
        drain: called with the address of a node whose GPU is broken, and the cause.
    """

    def __init__(self, lines: Callable[[float], Mapping[str, list[str]]], drain: Callable[[str, str], None]):
        self._lines = lines
        self._drain = drain
        self._since = time.monotonic()

    def examine(self, error: Exception) -> Exception:
        """Return the failure, or the one of a GPU that explains it. Nodes with a broken GPU are drained.

        A kernel is believed more than the error: if a GPU fails, a rank on another node may fail first.
        """
        origin, now = origin_of(error), time.monotonic()
        if origin is None or isinstance(error, UserError):
            return error
        seconds, self._since = min(now - self._since, _LONGEST_S), now
        found = [
            (gpu_error, node, line)
            for node, lines in self._ask(seconds).items()
            for line in lines
            if (gpu_error := gpu_error_in(line)) is not None and gpu_error.is_of_machine
        ]
        own = gpu_error_in(describe_error(error))
        blamed = [(gpu_error, node) for gpu_error, node, _ in found] + ([(own, origin.node)] if own else [])
        for gpu_error, node in blamed:
            if gpu_error.is_broken and node:
                self._drain(node, gpu_error.cause)
        if not found:
            return error
        _, node, line = max(found)
        fact = f"{origin.name} failed, and the kernel of node {node} says: {one_line(line)}"
        explained = WorkerError(fact, f"repair or drain the node, and {RESTART_HINT}", "gpu")
        set_origin(explained, FailureSource(origin.name, node))
        explained.__cause__ = error
        return explained

    def _ask(self, seconds: float) -> Mapping[str, list[str]]:
        try:
            return self._lines(seconds)
        except Exception:  # a cluster that fails must not hide the failure that is examined
            return {}
