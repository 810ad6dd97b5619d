"""The failures of a run: one line of `incidents.jsonl` for each incident."""

from __future__ import annotations

import contextlib
import json
import os
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
    describe_with_place,
    failure_source_of,
)
from trainer.files.appended import AppendedFile
from trainer.files.atomic_io import open_regular
from trainer.files.documents import is_count, is_number, parse_object
from trainer.files.redaction import redact_text
from trainer.process.failures import INFRASTRUCTURE, JOB, classify
from trainer.process.signals import Stopped

INCIDENTS_FILE = "incidents.jsonl"


@dataclass(frozen=True)
class Incident:
    """One incident. Its fields are those of a line of `incidents.jsonl`."""

    step: int
    """The step during which it happened."""
    role: str
    """Role of the process: `driver`, `rank`, `engine`, `environment`, `reward`."""
    name: str
    """Name of the process, such as `rank 1`."""
    node: str
    kind: str
    """Failure class: `INFRASTRUCTURE`, `JOB` or `PREEMPTION`. In the file it is called `class`."""
    cause: str
    action: str
    """The reaction of the job: `restarted the ranks`, `ended`, …"""
    cost_s: float
    """Lost training time in seconds: waiting, and steps that are trained again."""
    text: str
    """A message of one sentence."""
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
        self.step = 0
        """The current step, for packages that do not know it."""

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

    def note(self, role: str, name: str, cause: str, action: str, text: str, step: int | None = None) -> None:
        """Append a line about a failure of this machine; `step` None: in the current step."""
        step = self.step if step is None else step
        node = socket.gethostname()
        self.record(Incident(step, role, name, node, INFRASTRUCTURE, cause, action, 0.0, text))


INCIDENTS = IncidentLog()


def record_replaced_process(role: str, ending: str, cost_s: float) -> None:
    """Record that a process of user code died, such as by `exit status 3` or `SIGKILL`, and that another has replaced
    it. `cost_s` is the duration of the calls that were lost with it, in seconds."""
    has_exited = ending.startswith("exit status ") and not ending.startswith("exit status -")  # negative: a signal
    failure_class, cause = (JOB, "exit") if has_exited else (INFRASTRUCTURE, "killed process")
    text = f"a {role} process ended ({ending})"
    name, node = f"{role} process", socket.gethostname()
    action = "replaced the process and repeated its calls"
    INCIDENTS.record(Incident(INCIDENTS.step, role, name, node, failure_class, cause, action, round(cost_s, 3), text))


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
