"""What a failure is, and what to do about it: its class, the GPU behind it, and whether processes start again."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from trainer.errors import (
    RESTART_HINT,
    DivergedError,
    FailureSource,
    NonFiniteError,
    NonRetryableError,
    UserError,
    WorkerError,
    describe_error,
    failure_source_of,
    is_out_of_memory,
    one_line,
    set_failure_source,
)
from trainer.process import time_limits
from trainer.process.signals import Stopped

INFRASTRUCTURE = "infrastructure"
"""The machines failed. The same step succeeds on another machine or later."""
JOB = "job"
"""The run itself may be at fault. The same step may fail again."""
PREEMPTION = "pre-emption"
"""A user or a scheduler requested the stop."""

_CAUSES = {
    "killed": (INFRASTRUCTURE, "killed process"),
    "heartbeat_timeout": (INFRASTRUCTURE, "heartbeat timeout"),
    "rpc_timeout": (INFRASTRUCTURE, "RPC timeout"),
    "node": (INFRASTRUCTURE, "failed node"),
    "cluster": (INFRASTRUCTURE, "Ray died"),
    "memory": (JOB, "out of memory"),
    "weights": (JOB, "weights not sent"),
    "server": (INFRASTRUCTURE, "inference server"),
    "server_absent": (INFRASTRUCTURE, "inference server"),
    "gpu_memory_in_use": (INFRASTRUCTURE, "GPU memory in use"),
}
"""Failure class and description of each cause of a `WorkerError`."""
_COLLECTIVE = r"NCCL|gloo|collective|process group|c10d|TCPStore|recvBytes"
_SIGNS: tuple[tuple[str, str, str], ...] = (
    (rf"(?s)(?=.*(?:{_COLLECTIVE}|Connection)).*timed? ?out", INFRASTRUCTURE, "collective timeout"),
    (rf"{_COLLECTIVE}|Connection (closed|reset|refused)|Broken pipe", INFRASTRUCTURE, "network"),
    (r"No space left|Input/output error|Stale file handle|Read-only file system|Disk quota", INFRASTRUCTURE, "storage"),
)
"""Patterns in the messages of library exceptions, with failure class and description of the cause."""
_OF_CODE = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, NameError, TypeError, ValueError),
    *(FileExistsError, FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError, ConnectionError),
)
"""What code raises that is wrong, or a path or an address that is. Machines that fail raise other errors."""

# ----------------------------------------------------------------------------------------------------------
# GPUs

_XID = re.compile(r"\bXid\b(?: \([^)]*\))?:?\s*(\d{1,3})\b")
# NVIDIA's Xid catalog (docs.nvidia.com/deploy/xid-errors) gives an action for each code. Other codes: restart.
_OF_PROGRAMS = frozenset({11, 13, 25, 31, 32, 43, 69, 80})
"""Codes that a faulty program causes."""
_HARMLESS = frozenset({14, 37, 38, 44, 45, 63, 66, 67, 92, 93, 106, 107, 121, 137, 141, 152, 153, 154, 157, 161})
"""Codes that need no action or repeat another code."""
_BROKEN = frozenset(
    {46, 48, 54, 62, 64, 74, 79, 95, 109, 110, 119, 120, 136, 140, *range(143, 152), 155, 156, 158, 160, 162}
)
"""Codes after which the GPU or the whole machine must be reset or repaired."""
_TEXTS = (
    (
        r"uncorrectable (ECC|NVLink) error|fallen off the bus|GPU is lost|NVLink error|"
        r"Unable to determine the device handle|no CUDA-capable device is detected",
        (True, True, "GPU error"),
    ),
    (r"hardware error|device\(s\) is/are busy or unavailable|system not yet initialized", (False, True, "GPU error")),
    (r"illegal memory access|device-side assert", (False, False, "CUDA error")),
)
"""Patterns of messages without a code, with the fields of their `GpuError`."""
KERNEL_LOG = "/dev/kmsg"
_LONGEST_RECORD = 8192


@dataclass(frozen=True, order=True)
class GpuError:
    """A GPU error that a text reports. The worst error is the greatest."""

    is_broken: bool
    """The GPU does not recover by itself: its node should be drained."""
    is_of_machine: bool
    """True: the machine caused it. False: the program caused it."""
    cause: str
    """A short description, such as `GPU error (Xid 79)`."""


def gpu_error_in(text: str) -> GpuError | None:
    """Return the worst GPU error in a message of the kernel or of a library, or None if there is none."""
    codes = [code for code in map(int, _XID.findall(text)) if code not in _HARMLESS]
    errors = [GpuError(code in _BROKEN, code not in _OF_PROGRAMS, f"GPU error (Xid {code})") for code in codes]
    found = (GpuError(*fields) for pattern, fields in _TEXTS if re.search(pattern, text, re.IGNORECASE))
    return max(errors) if errors else next(found, None)


def gpu_lines(seconds: float) -> list[str]:
    """Return the messages of this machine's kernel about GPUs in the last `seconds`.

    Empty if this process may not read the kernel's log, as in most containers.
    """
    now, lines = time.clock_gettime(time.CLOCK_MONOTONIC), []
    with contextlib.suppress(OSError, ValueError):
        handle = os.open(KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK)
        try:
            while True:
                try:
                    record = os.read(handle, _LONGEST_RECORD).decode(errors="replace")
                except BrokenPipeError:  # the record was overwritten before it was read
                    continue
                if not record:
                    break
                head, _, text = record.partition(";")  # at the end of the buffer, a read raises
                if "NVRM" in text and now - int(head.split(",")[2]) / 1e6 <= seconds:
                    lines.append(text.partition("\n")[0])
        finally:
            os.close(handle)
    return lines


class GpuHealthCheck:
    """Checks whether a GPU caused a failure of ranks.

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
        """Return the GPU failure that explains `error`, or `error` itself. Drain the nodes with a broken GPU."""
        if failure_source_of(error) is None or isinstance(error, UserError):
            return error
        now = time.monotonic()
        seconds, self._since = min(now - self._since, time_limits.KERNEL_LOG_AGE_S), now
        logs: Mapping[str, list[str]] = {}
        with contextlib.suppress(Exception):  # an error of the cluster must not hide the failure that is examined
            logs = self._read_kernel_logs(seconds)
        explained, broken = explain_by_gpus(error, logs)
        for node, cause in broken.items():
            self._drain(node, cause)
        return explained


def explain_by_gpus(error: Exception, logs: Mapping[str, list[str]]) -> tuple[Exception, dict[str, str]]:
    """Return the GPU failure that explains `error`, or `error` itself, and the nodes with a broken GPU with the causes.

    A kernel log takes precedence over the error: if a GPU fails, a rank on another node may report an error first.

    Args:
        error: has a failure source.
        logs: messages of the kernels about GPUs, by the address of the node.
    """
    source = failure_source_of(error)
    assert source is not None
    found = [(gpu_error_in(line), node, line) for node, lines in logs.items() for line in lines]
    logged = [(one, node, line) for one, node, line in found if one is not None and one.is_of_machine]
    in_text = gpu_error_in(describe_error(error))
    suspects = [(one, node) for one, node, _ in logged] + ([(in_text, source.node)] if in_text else [])
    broken = {node: one.cause for one, node in suspects if one.is_broken and node}
    if not logged:
        return error, broken
    _, node, line = max(logged)
    message = f"{source.name} failed, and the kernel of node {node} logged: {one_line(line)}"
    explained = WorkerError(message, f"repair or drain the node, and {RESTART_HINT}", "gpu")
    set_failure_source(explained, FailureSource(source.name, node))
    explained.__cause__ = error
    return explained, broken


# ----------------------------------------------------------------------------------------------------------
# Classes of failures, and restarts


def classify(error: BaseException) -> tuple[str, str]:
    """Return the class of a failure (`INFRASTRUCTURE`, `JOB` or `PREEMPTION`) and a short description of its cause."""
    if isinstance(error, (Stopped, KeyboardInterrupt)):
        return PREEMPTION, "stop request"
    if isinstance(error, NonFiniteError):
        return JOB, "non-finite number"
    if isinstance(error, DivergedError):
        return JOB, "divergence"
    if isinstance(error, UserError):
        return JOB, "refused"
    if isinstance(error, WorkerError) and error.cause != "gpu":
        return _CAUSES.get(error.cause, (INFRASTRUCTURE, "process"))
    if is_out_of_memory(error):
        return _CAUSES["memory"]
    if isinstance(error, _OF_CODE):
        return JOB, "exception"
    text = f"{type(error).__name__}: {error}"
    if (gpu_error := gpu_error_in(text)) is not None:
        return (INFRASTRUCTURE if gpu_error.is_of_machine else JOB), gpu_error.cause
    signs = (sign[1:] for sign in _SIGNS if re.search(sign[0], text, re.IGNORECASE))
    return next(signs, (JOB, "exception"))


def can_recover(error: Exception) -> bool:
    """Return whether new processes can help: the failure came from one of them, and not from the driver."""
    if isinstance(error, (UserError, NonRetryableError)):
        return False
    if isinstance(error, WorkerError) and error.cause in ("cluster", "restart_limit", "server_absent"):
        return False
    return isinstance(error, NonFiniteError) or failure_source_of(error) is not None


@dataclass(frozen=True)
class Decision:
    """What to do after a failure."""

    delay_s: float = 0.0
    """Seconds to wait before the restart."""
    refusal: str = ""
    """Why there is no restart. Empty: restart."""
    repeated: bool = False
    """The run itself is at fault: its step failed again in the same way."""


class Restarts:
    """Counts the restarts of processes with the same role. Uses neither processes nor clocks.

    Args:
        limit: largest number of restarts within the window (`trainer.max_restarts`).
        window_s: length of the window.
    """

    def __init__(self, limit: int, window_s: float):
        self._limit = limit
        self._window_s = window_s
        self._times: list[float] = []
        self._faults: set[tuple[int, str]] = set()
        self.count = 0
        """Restarts so far."""

    def decide(self, error: Exception, step: int, now: float) -> Decision:
        """Return the decision after `error`. A restart counts from now on.

        Args:
            step: the step during which the error happened.
            now: seconds on a monotonic clock.
        """
        if not can_recover(error):
            return Decision(refusal="a restart does not help")
        failure_class, cause = classify(error)
        if failure_class == JOB and (step, cause) in self._faults:
            return Decision(refusal=f"step {step} failed again in the same way when it was repeated", repeated=True)
        self._times = [time for time in self._times if now - time < self._window_s]
        if len(self._times) >= self._limit:
            return Decision(refusal=f"{len(self._times)} restarts within {self._window_s / 60:g} minutes are the limit")
        if failure_class == JOB:
            self._faults.add((step, cause))
        delay = time_limits.RESTART_FIRST_DELAY_S * 2 ** (len(self._times) - 1) if self._times else 0.0
        self._times.append(now)
        self.count += 1
        return Decision(min(delay, time_limits.RESTART_LONGEST_DELAY_S))
