"""Check whether a GPU caused a failure of ranks, by the text of the error and by the kernel logs of the nodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from trainer.errors import (
    RESTART_HINT,
    FailureSource,
    UserError,
    WorkerError,
    describe_error,
    failure_source_of,
    one_line,
    set_failure_source,
)
from trainer.process import time_limits
from trainer.process.xid import gpu_error_in


class GpuHealthCheck:
    """Checks whether a GPU caused a failure.

    Args:
        read_kernel_logs: returns the messages that the kernel of each node has logged about its GPUs in the last
            `seconds`, by the address of the node.
        drain: called with the address of a node whose GPU is broken, and the cause.
    """

    def __init__(self, read_kernel_logs: Callable[[float], Mapping[str, list[str]]], drain: Callable[[str, str], None]):
        self._read_kernel_logs = read_kernel_logs
        self._drain = drain
        self._since = time.monotonic()

    def examine(self, error: Exception) -> Exception:
        """Return the GPU failure that explains `error`, or `error` itself. Drain the nodes with a broken GPU.

        A kernel log takes precedence over the error: if a GPU fails, a rank on another node may report an error first.
        """
        source, now = failure_source_of(error), time.monotonic()
        if source is None or isinstance(error, UserError):
            return error
        seconds, self._since = min(now - self._since, time_limits.KERNEL_LOG_AGE_S), now
        logged = [
            (gpu_error, node, line)
            for node, lines in self._kernel_logs(seconds).items()
            for line in lines
            if (gpu_error := gpu_error_in(line)) is not None and gpu_error.is_of_machine
        ]
        in_text = gpu_error_in(describe_error(error))
        suspects = [(gpu_error, node) for gpu_error, node, _ in logged] + ([(in_text, source.node)] if in_text else [])
        for gpu_error, node in suspects:
            if gpu_error.is_broken and node:
                self._drain(node, gpu_error.cause)
        if not logged:
            return error
        _, node, line = max(logged)
        message = f"{source.name} failed, and the kernel of node {node} logged: {one_line(line)}"
        explained = WorkerError(message, f"repair or drain the node, and {RESTART_HINT}", "gpu")
        set_failure_source(explained, FailureSource(source.name, node))
        explained.__cause__ = error
        return explained

    def _kernel_logs(self, seconds: float) -> Mapping[str, list[str]]:
        try:
            return self._read_kernel_logs(seconds)
        except Exception:  # an error of the cluster must not hide the failure that is examined
            return {}
