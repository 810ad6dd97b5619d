"""Whole jobs that get a signal, and what is wrong with the way they ended."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from tests.support.jobs import command, environment, left_running, shared_memory

END_S = 120


class Job:
    """A small job that has just been started, in a process group of its own."""

    def __init__(self, scratch: Path, name: str, overrides: list[str], env: dict[str, str] | None = None):
        self.directory = scratch / name
        self.directory.mkdir(exist_ok=True)
        self.log = self.directory / "output"
        self.marker = str(self.directory)
        self.shared_before = shared_memory()
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command("trainer.run_dir=run", "trainer.resume_mode=latest", *overrides),
                cwd=self.directory,
                env={**environment(), "TRAINER_TEST_MARKER": self.marker, **(env or {})},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def output(self) -> str:
        return self.log.read_text()

    def last_line(self) -> str:
        return (self.output().strip().splitlines() or [""])[-1]

    def says(self, text: str) -> bool:
        return text in self.output()

    def delete(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)


def send(number: signal.Signals) -> Callable[[subprocess.Popen], None]:
    return lambda process: process.send_signal(number)


def send_to_group(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)


def send_as_timeout(process: subprocess.Popen) -> None:
    """`timeout` of the GNU coreutils sends the signal to the process, then to the process group."""
    process.send_signal(signal.SIGTERM)
    time.sleep(0.01)
    send_to_group(process)


def send_two(process: subprocess.Popen) -> None:
    process.send_signal(signal.SIGUSR1)
    time.sleep(0.1)
    process.send_signal(signal.SIGTERM)


WAYS: dict[str, Callable[[subprocess.Popen], None]] = {
    "SIGTERM": send(signal.SIGTERM),
    "SIGUSR1": send(signal.SIGUSR1),
    "Ctrl-C": send(signal.SIGINT),
    "SIGTERM to the group": send_to_group,
    "timeout": send_as_timeout,
    "SIGUSR1, SIGTERM": send_two,
}


def problems_of(job: Job) -> list[str]:
    """Wait for the end of a job that got a signal; returns what is wrong with its end."""
    try:
        status = job.process.wait(END_S)
    except subprocess.TimeoutExpired:
        job.process.kill()
        job.process.wait()
        return [f"did not end within {END_S} s"]
    output = job.output()
    problems = []
    if status == 75:
        if output.count("stopped ") != 1 or "stopped " not in job.last_line():
            problems.append("does not end with one sentence")
    elif status != 0 or "finished step" not in output:
        problems.append(f"status {status}")
    for sign in ("Traceback", "Error", "Exception ignored", "Fatal"):
        if sign in output:
            problems.append(f"{sign} in the output")
    if left := left_running(job.marker):
        problems.append(f"left running: {left}")
    if shared := shared_memory() - job.shared_before:
        problems.append(f"left in shared memory: {shared}")
    if (job.directory / "run/.lock").exists():
        problems.append("left the lock")
    return problems
