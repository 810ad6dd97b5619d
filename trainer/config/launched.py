"""Jobs of a sweep that a launcher of Hydra runs in other processes (`hydra/launcher=submitit_local`, `…_slurm`).

Each job leaves a note of its end in the directory of the sweep, because launchers pass on values alone. The process of
the sweep reads the notes.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import tempfile
from typing import TYPE_CHECKING, NamedTuple

from trainer.errors import WorkerError
from trainer.files.atomic_io import write_file
from trainer.process import time_limits
from trainer.process.signals import SIGNALS, Stopped

if TYPE_CHECKING:
    import psutil

_VARIABLE = "TRAINER_SWEEP_NOTES"  # the processes of the jobs inherit it


class JobResult(NamedTuple):
    """How a job of a sweep ended."""

    name: str
    status: int
    text: str


def prepare_notes(directory: str) -> None:
    """Make a directory for the notes of this sweep below `directory`. The process of the sweep calls this."""
    parent = os.path.join(directory, ".ends")
    os.makedirs(parent, exist_ok=True)
    os.environ[_VARIABLE] = os.path.abspath(tempfile.mkdtemp(dir=parent))


def note_end(number: int, end: JobResult) -> None:
    """Leave a note of how this job ended.

    Raises:
        WorkerError: the job failed, and the process of the sweep would not learn of it.
    """
    if directory := os.environ.get(_VARIABLE):
        write_file(os.path.join(directory, f"{number:06d}.json"), json.dumps(end))
    elif end.status:
        raise WorkerError(f"{end.name}: {end.text}")


def noted_ends() -> list[JobResult]:
    """Return how the jobs ended that have left a note, in the order of the jobs."""
    ends = []
    if directory := os.environ.get(_VARIABLE):
        for path in sorted(glob.glob(os.path.join(glob.escape(directory), "*.json"))):
            with open(path) as file:
                ends.append(JobResult(*json.load(file)))
    return ends


def wait_for_local_jobs() -> int:
    """Wait until the jobs have ended that submitit runs on this machine. Returns their number.

    They get SIGTERM if this process has received a signal, and again for each further signal.
    """
    import psutil

    jobs = [child for child in psutil.Process().children() if "submitit.local._local" in _command(child)]
    running, sent = jobs, 0
    with contextlib.suppress(Stopped), SIGNALS.deferred():
        while running:
            if SIGNALS.count > sent:
                sent = SIGNALS.count
                for job in running:
                    job.terminate()
            _, running = psutil.wait_procs(running, timeout=time_limits.POLL_INTERVAL_S)
    return len(jobs)


def _command(process: psutil.Process) -> list[str]:
    import psutil

    try:
        return process.cmdline()
    except psutil.Error:  # it has just ended
        return []
