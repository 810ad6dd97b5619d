"""What went wrong in a run: one line of `incidents.jsonl` for each incident, and the class of a failure."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from trainer.errors import (
    DivergedError,
    FailureSource,
    NonFiniteError,
    UserError,
    WorkerError,
    describe_error,
    failure_source_of,
    is_out_of_memory,
)
from trainer.files.appended import AppendedFile
from trainer.files.documents import is_count, is_number, parse_object
from trainer.files.redaction import redact_text
from trainer.process.signals import Stopped
from trainer.process.xid import gpu_error_in

INCIDENTS_FILE = "incidents.jsonl"

INFRASTRUCTURE = "infrastructure"
"""The machines failed. The same step succeeds elsewhere, or later."""
JOB = "job"
"""The run itself may be at fault. The same step may fail again."""
PREEMPTION = "pre-emption"
"""Somebody asked the run to stop."""

_CAUSES = {
    "killed": (INFRASTRUCTURE, "killed process"),
    "heartbeat_timeout": (INFRASTRUCTURE, "heartbeat timeout"),
    "rpc_timeout": (INFRASTRUCTURE, "RPC timeout"),
    "node": (INFRASTRUCTURE, "failed node"),
    "cluster": (INFRASTRUCTURE, "Ray died"),
    "memory": (JOB, "out of memory"),
    "weights": (JOB, "weights not sent"),
    "gpu_memory_in_use": (INFRASTRUCTURE, "GPU memory in use"),
}
"""Class and name of the causes of a `WorkerError`."""

_SIGNS: tuple[tuple[str, str, str], ...] = (
    (r"timed? ?out", INFRASTRUCTURE, "collective timeout"),
    (r"NCCL|gloo|Connection (closed|reset|refused)|recvBytes|Broken pipe|process group", INFRASTRUCTURE, "network"),
    (r"No space left|Input/output error|Stale file handle|Read-only file system|Disk quota", INFRASTRUCTURE, "storage"),
)
"""Patterns in the texts of exceptions of libraries, with the class and the name of the cause."""
_COLLECTIVE = re.compile(r"NCCL|gloo|collective|process group|c10d|TCPStore|recvBytes|Connection", re.IGNORECASE)


def classify(error: BaseException) -> tuple[str, str]:
    """Return the class of a failure (`INFRASTRUCTURE`, `JOB` or `PREEMPTION`), and its cause in few words."""
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
    text = f"{type(error).__name__}: {error}"
    if (gpu_error := gpu_error_in(text)) is not None:
        return (INFRASTRUCTURE if gpu_error.is_of_machine else JOB), gpu_error.cause
    for pattern, kind, cause in _SIGNS:
        if re.search(pattern, text, re.IGNORECASE) and (cause != "collective timeout" or _COLLECTIVE.search(text)):
            return kind, cause
    from_system = isinstance(error, OSError) and error.errno is not None
    return (INFRASTRUCTURE, "storage") if from_system else (JOB, "exception")


@dataclass(frozen=True)
class Incident:
    """One incident, as a line of `incidents.jsonl` has it."""

    step: int
    """The step that was under way."""
    role: str
    """Kind of the process: `driver`, `rank`, `engine`, `environment`, `reward`."""
    name: str
    """The process, such as `rank 1`."""
    node: str
    kind: str
    """`INFRASTRUCTURE`, `JOB` or `PREEMPTION`; `class` in the file."""
    cause: str
    action: str
    """What the job did: `restarted the ranks`, `ended`, …"""
    cost_s: float
    """Seconds of training that it cost: waiting, and steps that are trained again."""
    text: str
    """One sentence."""
    time: str = field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%S%z"))
    """ISO 8601, of the end of the action."""


def describe(error: BaseException, step: int, action: str, cost_s: float) -> Incident:
    """Return the incident that `error` reports."""
    kind, cause = classify(error)
    origin = failure_source_of(error) or FailureSource("driver", socket.gethostname())
    text = error.message if isinstance(error, WorkerError) else str(error)
    if not isinstance(error, (WorkerError, NonFiniteError, DivergedError, UserError, Stopped)):
        text = describe_error(error)
    text = " ".join(text.split())
    return Incident(step, origin.role, origin.name, origin.node, kind, cause, action, round(cost_s, 3), text)


class IncidentLog:
    """Appends to `incidents.jsonl` of the run that is open. One object serves the process: `INCIDENTS`."""

    def __init__(self) -> None:
        self._file: AppendedFile | None = None
        self.step = 0
        """The step that is under way, for incidents of rooms that do not know it."""

    def open(self, run_dir: str, fence: Callable[[], None] = lambda: None) -> AppendedFile | None:
        """Append to the file in `run_dir` from now on; returns the file before, for `close`.

        Args:
            fence: raises when this process no longer holds the run directory.
        """
        before, self._file = self._file, AppendedFile(os.path.join(run_dir, INCIDENTS_FILE), fence)
        return before

    def close(self, before: AppendedFile | None) -> None:
        """Append to the file `before` again, that of an outer run; None: drop later incidents."""
        if self._file is not None:
            with contextlib.suppress(OSError, UserError):
                self._file.check()
        self._file = before

    def record(self, incident: Incident) -> None:
        """Append a line. A file that cannot be written does not disturb training."""
        if self._file is None:
            return
        content = {"time": incident.time, **asdict(incident), "text": redact_text(incident.text)}  # the time first
        content["class"] = content.pop("kind")
        with contextlib.suppress(OSError, UserError):
            self._file.append(json.dumps(content).encode() + b"\n")


INCIDENTS = IncidentLog()


def record_replaced_process(role: str, ending: str, cost_s: float) -> None:
    """Record that a process of user code died, and that another one has taken its place.

    Args:
        role: `reward` or `environment`.
        ending: how the process ended, such as `exit status 3` or `SIGKILL`.
        cost_s: seconds of calls that were lost with it.
    """
    ended_itself = ending.startswith("exit status ") and not ending.startswith("exit status -")  # below 0: a signal
    kind, cause = (JOB, "exit") if ended_itself else (INFRASTRUCTURE, "killed process")
    text = f"a {role} process ended ({ending})"
    name, node = f"{role} process", socket.gethostname()
    action = "replaced the process and repeated its calls"
    INCIDENTS.record(Incident(INCIDENTS.step, role, name, node, kind, cause, action, round(cost_s, 3), text))


_SHAPE = {
    **dict.fromkeys(("time", "role", "name", "node", "class", "cause", "action", "text"), str),
    "step": is_count,
    "cost_s": is_number,
}


def read_incidents(run_dir: str) -> list[Incident]:
    """Return the incidents of a run in file order. Lines that cannot be read are left out."""
    path = os.path.join(run_dir, INCIDENTS_FILE)
    if not os.path.exists(path):
        return []
    found = []
    with open(path, "rb") as file:
        for line in file:
            try:
                row = parse_object(line, _SHAPE)
            except ValueError:
                continue
            row["kind"] = row.pop("class")
            found.append(Incident(**{name: row[name] for name in Incident.__dataclass_fields__}))
    return found
