"""What a failure is, and what to do about it: its class, the GPU behind it, and whether processes start again."""

from __future__ import annotations

import re
from dataclasses import dataclass

from trainer.errors import (
    DivergedError,
    NonFiniteError,
    NonRetryableError,
    UserError,
    WorkerError,
    describe_error,
    failure_source_of,
    is_out_of_memory,
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
_SIGNS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("timed? ?out", f"{_COLLECTIVE}|Connection"), "collective timeout"),
    ((f"{_COLLECTIVE}|Connection (closed|reset|refused)|Broken pipe",), "network"),
    (("No space left|Input/output error|Stale file handle|Read-only file system|Disk quota",), "storage"),
)
"""Patterns that all occur in the message of a library exception, and the cause. Its class is `INFRASTRUCTURE`."""
_LONGEST_TEXT = 20_000
"""Characters of a message in which a cause is looked for: half of them at its beginning, half at its end."""
_OF_CODE = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, NameError, TypeError, ValueError),
    *(FileExistsError, FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError, ConnectionError),
)
"""What code raises that is wrong, or a path or an address that is. Machines that fail raise other errors."""

# ----------------------------------------------------------------------------------------------------------
# GPUs

_TEXTS = (
    (
        r"uncorrectable (ECC|NVLink) error|fallen off the bus|GPU is lost|NVLink error|"
        r"Unable to determine the device handle|no CUDA-capable device is detected",
        (True, True, "GPU error"),
    ),
    (r"hardware error|device\(s\) is/are busy or unavailable|system not yet initialized", (False, True, "GPU error")),
    (r"illegal memory access|device-side assert", (False, False, "CUDA error")),
)
"""Patterns of messages, with the fields of their `GpuError`."""


@dataclass(frozen=True)
class GpuError:
    """A GPU error that a text reports."""

    is_broken: bool
    """The GPU does not recover by itself: its node should be drained."""
    is_of_machine: bool
    """True: the machine caused it. False: the program caused it."""
    cause: str
    """A short description, such as `GPU error`."""


def gpu_error_in(text: str) -> GpuError | None:
    """Return the GPU error in the message of a library, or None if there is none."""
    return next((GpuError(*fields) for pattern, fields in _TEXTS if re.search(pattern, text, re.IGNORECASE)), None)


def broken_node(error: Exception) -> tuple[str, str] | None:
    """Return the node whose broken GPU a process has reported, and the cause; None: no GPU is broken."""
    source, found = failure_source_of(error), gpu_error_in(describe_error(error))
    if source is None or not source.node or isinstance(error, UserError) or found is None or not found.is_broken:
        return None
    return source.node, found.cause


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
    if isinstance(error, WorkerError):
        return _CAUSES.get(error.cause, (INFRASTRUCTURE, "process"))
    if is_out_of_memory(error):
        return _CAUSES["memory"]
    if isinstance(error, _OF_CODE):
        return JOB, "exception"
    text = f"{type(error).__name__}: {error}"
    text = text if len(text) <= _LONGEST_TEXT else text[: _LONGEST_TEXT // 2] + text[-_LONGEST_TEXT // 2 :]
    if (gpu_error := gpu_error_in(text)) is not None:
        return (INFRASTRUCTURE if gpu_error.is_of_machine else JOB), gpu_error.cause
    for patterns, cause in _SIGNS:
        if all(re.search(pattern, text, re.IGNORECASE) for pattern in patterns):
            return INFRASTRUCTURE, cause
    return JOB, "exception"


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
    """Counts the restarts of processes with the same role, of which a window of `window_s` may have `limit`
    (`trainer.max_restarts`). Uses neither processes nor clocks."""

    def __init__(self, limit: int, window_s: float):
        self._limit = limit
        self._window_s = window_s
        self._times: list[float] = []
        self._faults: set[tuple[int, str]] = set()
        self.count = 0
        """Restarts so far."""

    def decide(self, error: Exception, step: int, now: float) -> Decision:
        """Return the decision after `error`, which happened during `step`. A restart counts from now on."""
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
