"""Failures: their class, the GPU behind them, whether processes start again, and the record of them in the run."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace

from trainer.errors import (
    DivergedError,
    FailureSource,
    NonFiniteError,
    NonRetryableError,
    UserError,
    WorkerError,
    describe_error,
    describe_with_place,
    failure_source_of,
    is_out_of_memory,
)
from trainer.files.appended import AppendedFile
from trainer.files.atomic_io import open_regular
from trainer.files.documents import is_count, is_number, parse_object
from trainer.files.redaction import redact_text
from trainer.process import time_limits
from trainer.process.signals import Stopped

INFRASTRUCTURE = "infrastructure"
"""The machines failed. The same step succeeds on another machine or later."""
JOB = "job"
"""The run itself may be at fault. The same step may fail again."""
PREEMPTION = "pre-emption"  # a user or a scheduler requested the stop

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

_TEXTS = (
    (
        r"uncorrectable (ECC|NVLink) error|fallen off the bus|GPU is lost|NVLink error|"
        r"Unable to determine the device handle|no CUDA-capable device is detected",
        (True, True, "GPU error"),
    ),
    (r"hardware error|device\(s\) is/are busy or unavailable|system not yet initialized", (False, True, "GPU error")),
    (r"illegal memory access|device-side assert", (False, False, "CUDA error")),
)
"""Patterns of messages of libraries about a GPU. Whether it is broken, so that its node should be drained; whether the
machine caused the error, and not the program; and a short description."""


def gpu_error_in(text: str) -> tuple[bool, bool, str] | None:
    """Return the GPU error in the message of a library (see `_TEXTS`), or None if there is none."""
    return next((fields for pattern, fields in _TEXTS if re.search(pattern, text, re.IGNORECASE)), None)


def broken_node(error: Exception) -> tuple[str, str] | None:
    """Return the node whose broken GPU a process has reported, and the cause; None: no GPU is broken."""
    source, found = failure_source_of(error), gpu_error_in(describe_error(error))
    if source is None or not source.node or isinstance(error, UserError) or found is None or not found[0]:
        return None
    return source.node, found[2]


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
        return (INFRASTRUCTURE if gpu_error[1] else JOB), gpu_error[2]
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

    delay_s: float = 0.0  # seconds to wait before the restart
    refusal: str = ""
    """Why there is no restart. Empty: restart."""
    repeated: bool = False  # the run itself is at fault: its step failed again in the same way


@dataclass(frozen=True)
class Restarts:
    """The restarts of processes with the same role, of which a window of `window_s` may have `limit`
    (`trainer.max_restarts`)."""

    limit: int
    window_s: float
    times: tuple[float, ...] = ()  # those within the window at the last decision
    faults: frozenset[tuple[int, str]] = frozenset()
    """Steps and causes of the failures of the class `JOB` after which processes were restarted."""
    count: int = 0  # restarts so far


def decide(restarts: Restarts, error: Exception, step: int, now: float) -> tuple[Decision, Restarts]:
    """Return the decision after `error`, which happened during `step`, and the restarts with the one it decides on."""
    if not can_recover(error):
        return Decision(refusal="a restart does not help"), restarts
    failure_class, cause = classify(error)
    faults = {(step, cause)} if failure_class == JOB else set()
    if faults & restarts.faults:
        refusal = f"step {step} failed again in the same way when it was repeated"
        return Decision(refusal=refusal, repeated=True), restarts
    times = tuple(time for time in restarts.times if now - time < restarts.window_s)
    if len(times) >= restarts.limit:
        refusal = f"{len(times)} restarts within {restarts.window_s / 60:g} minutes are the limit"
        return Decision(refusal=refusal), restarts
    delay_s = time_limits.RESTART_FIRST_DELAY_S * 2 ** (len(times) - 1) if times else 0.0
    after = replace(restarts, times=(*times, now), faults=restarts.faults | faults, count=restarts.count + 1)
    return Decision(min(delay_s, time_limits.RESTART_LONGEST_DELAY_S)), after


# ----------------------------------------------------------------------------------------------------------
# The failures of a run: `incidents.jsonl` has one line for each incident

INCIDENTS_FILE = "incidents.jsonl"


@dataclass(frozen=True)
class Incident:
    """One incident. Its fields are those of a line of `incidents.jsonl`."""

    step: int  # the step during which it happened
    role: str  # role of the process: `driver`, `rank`, `engine`, `environment`, `reward`
    name: str  # name of the process, such as `rank 1`
    node: str
    kind: str
    """Failure class: `INFRASTRUCTURE`, `JOB` or `PREEMPTION`. In the file it is called `class`."""
    cause: str
    action: str  # the reaction of the job: `restarted the ranks`, `ended`, …
    cost_s: float  # lost training time in seconds: waiting, and steps that are trained again
    text: str  # a message of one sentence
    time: str = field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%S%z"))
    """End of the action, in ISO 8601."""


def describe(error: BaseException, step: int, action: str, cost_s: float) -> Incident:
    """Return the incident that `error` reports."""
    failure_class, cause = classify(error)
    source = failure_source_of(error) or FailureSource("driver", socket.gethostname())
    text = error.message if isinstance(error, WorkerError) else str(error)
    if not isinstance(error, (WorkerError, NonFiniteError, DivergedError, UserError, Stopped)):
        text = describe_with_place(error)
    text = " ".join(text.split())
    return Incident(step, source.role, source.name, source.node, failure_class, cause, action, round(cost_s, 3), text)


class IncidentLog:
    """Appends to `incidents.jsonl` of the current run. One object serves the process: `INCIDENTS`."""

    def __init__(self) -> None:
        self._file: AppendedFile | None = None
        self.step = 0  # the current step, for packages that do not know it

    def open(self, run_dir: str, fence: Callable[[], None] = lambda: None) -> None:
        """Append to the file in `run_dir`. `fence` raises when this process no longer holds the run directory."""
        self._file = AppendedFile(os.path.join(run_dir, INCIDENTS_FILE), fence)

    def close(self) -> None:
        """Drop later incidents."""
        if self._file is not None:
            with contextlib.suppress(OSError, UserError):
                self._file.sync()
        self._file = None

    def record(self, incident: Incident) -> None:
        """Append a line. A file that is not writable does not disturb training; for a full disk, the line waits."""
        if self._file is None:
            return
        content = {"time": incident.time, **asdict(incident), "text": redact_text(incident.text)}  # the time first
        content["class"] = content.pop("kind")
        with contextlib.suppress(OSError, UserError):
            self._file.append(json.dumps(content).encode() + b"\n")

    def note(
        self,
        role: str,
        name: str,
        cause: str,
        action: str,
        text: str,
        kind: str = INFRASTRUCTURE,
        step: int | None = None,
        node: str | None = None,
        cost_s: float = 0.0,
    ) -> None:
        """Append a line (see `Incident`). `step` None: the current step. `node` None: this machine."""
        step, node = self.step if step is None else step, node or socket.gethostname()
        self.record(Incident(step, role, name, node, kind, cause, action, round(cost_s, 3), text))


INCIDENTS = IncidentLog()


_FIELDS = {
    **dict.fromkeys(("time", "role", "name", "node", "class", "cause", "action", "text"), str),
    "step": is_count,
    "cost_s": is_number,
}


def read_incidents(run_dir: str) -> list[Incident]:
    """Return the incidents of a run in file order. Lines that cannot be parsed are skipped."""
    incidents = []
    with contextlib.suppress(FileNotFoundError), open_regular(os.path.join(run_dir, INCIDENTS_FILE)) as file:
        for line in file:
            try:
                row = parse_object(line, _FIELDS)
            except ValueError:
                continue
            row["kind"] = row.pop("class")
            incidents.append(Incident(**{name: row[name] for name in Incident.__dataclass_fields__}))
    return incidents
