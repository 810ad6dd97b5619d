"""Whole jobs that get a signal, and what is wrong with the way they ended.

`Job` starts the command as a user does. `ForkedJobs` forks a process that has imported everything, which is quick
enough for many moments.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tests.support.forks import fork_clusters, fork_server, run_module
from tests.support.jobs import command, environment, left_running
from trainer.files.shared_memory import clear_abandoned
from trainer.models.tiny import TinyShape, build_tiny

END_S = 120
FORKED = [
    "rollout=transformers",
    "trainer.device=cpu",
    "trainer.ray_address=processes",
    "trainer.resume_mode=latest",
    "trainer.total_steps=3",
    "trainer.train_batch_size=4",
    "trainer.mini_batch_size=2",
    "trainer.val_interval=3",
    "trainer.ckpt_interval=1",
    "rollout.n=2",
    "rollout.max_response_tokens=8",
    "data.train_size=16",
    "data.val_size=4",
    "reward.num_processes=1",
    "logger.plot=false",
]


class Job:
    """A small job that has just been started, in a process group of its own."""

    def __init__(self, scratch: Path, name: str, overrides: list[str], env: dict[str, str] | None = None):
        self.directory = scratch / name
        self.directory.mkdir(exist_ok=True)
        self.log = self.directory / "output"
        self.marker = str(self.directory)
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
    if shared := clear_abandoned():
        problems.append(f"left in shared memory: {shared}")
    if (job.directory / "run/.lock").exists():
        problems.append("left the lock")
    return problems


# ----------------------------------------------------------------------------------------------------------
# Jobs that are forked


class _ThisProcess:
    """Takes the place of the process in `WAYS`."""

    def __init__(self) -> None:
        self.pid = os.getpid()

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)


def _send_at(moment: str, delay_s: float, way: str, log: Path) -> None:
    """Send signals `delay_s` after `moment`: `start`, a stage (see `process.startup`), or a text in the output."""
    from trainer.process.startup import running_stage

    while moment != "start" and (running_stage() or ("",))[0] != moment and moment not in log.read_text():
        time.sleep(0.01)
    time.sleep(delay_s)
    WAYS[way](_ThisProcess())


def run_signalled(moment: str, delay_s: float, way: str, log: str, *overrides: str) -> None:
    """Run the job in this process, which sends signals to itself."""
    from trainer.process.signals import SIGNALS

    if way:
        fork_clusters()  # before there is a thread
        SIGNALS.listen()
        with SIGNALS.blocked():
            threading.Thread(target=_send_at, args=(moment, delay_s, way, Path(log)), daemon=True).start()
    run_module("trainer", "train", *overrides)


class ForkedJobs:
    """Runs one job again and again."""

    def __init__(self, directory: Path):
        self._directory = directory
        size = TinyShape(hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16)
        build_tiny(size, str(directory / "model"))
        self._overrides = [f"model.path={directory}/model", f"trainer.run_dir={directory}/run", *FORKED]

    def run(self, moment: str = "start", delay_s: float = 0.0, way: str = "") -> tuple[int, str]:
        """Run the job, and send a signal at a moment; return its status and output when nothing of it is left."""
        log = self._directory / "output"
        with log.open("w") as output:
            job = fork_server().start(
                "tests.support.signalled_jobs:run_signalled",
                *(moment, delay_s, way, str(log), *self._overrides),
                cwd=self._directory,
                env=environment(),
                stdout=output,
            )
        return job.wait(), log.read_text()
