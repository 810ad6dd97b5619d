"""Whole jobs for tests: the command line as a user gives it, on a model that is quick to make."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil

from tests.support.forks import ForkedCommand, fork_server, run_forked
from trainer.config import Config, TrainerConfig
from trainer.config.command_line import unread_words

SMALL = [
    "sft.steps=30",
    "sft.optimizer.warmup_steps=5",
    "data.train_size=64",
    "data.val_size=16",
    "trainer.train_batch_size=8",
    "trainer.mini_batch_size=4",
    "trainer.total_steps=2",
    "trainer.val_interval=2",
    "trainer.ckpt_interval=1",
    "rollout.n=4",
    "rollout.max_num_seqs=32",
    "logger.plot=false",  # drawing takes as long as training such a job
]


_PROGRAM = [sys.executable, "-m", "trainer"]


def command(*overrides: str, job: str = "train") -> list[str]:
    flags = [o for o in overrides if o.startswith("-")]  # argparse wants them on one side of all overrides
    return [*_PROGRAM, job, *flags, *read_words(SMALL, job), *(o for o in overrides if o not in flags)]


def read_words(words: Iterable[str], job: str) -> list[str]:
    """The overrides that the task of a command reads."""
    cfg = Config(trainer=TrainerConfig(task="sft" if job == "sft" else "rl"))
    return [word for word in words if not unread_words([word], cfg)]


def run_job(*overrides: str, cwd: Path, job: str = "train", small: bool = True, timeout: float = 300):
    """Run a job to its end; returns the completed process with its output as text."""
    args = command(*overrides, job=job) if small else [*_PROGRAM, job, *overrides]
    return subprocess.run(args, cwd=cwd, capture_output=True, text=True, timeout=timeout, env=environment())


def start_job(
    *overrides: str, cwd: Path, env: dict[str, str] | None = None, log: Path | None = None, job: str = "train"
):
    """Start a job in a process group of its own; its output goes to `log`, or to a pipe."""
    return subprocess.Popen(
        command(*overrides, job=job), cwd=cwd, text=True, env={**environment(), **(env or {})},
        stdout=subprocess.PIPE if log is None else open(log, "w"), stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip


FORKED = {"rollout": "transformers", "trainer.ray_address": "processes"}


def forked_arguments(*overrides: str, job: str) -> list[str]:
    """The arguments of a forked job. It has no Ray, and transformers unless it names an engine."""
    given = {override.partition("=")[0] for override in overrides}
    added = [f"{key}={value}" for key, value in FORKED.items() if key not in given]
    return [*command(*overrides, job=job)[3:], *read_words(added, job)]


def run_forked_job(*overrides: str, cwd: Path, job: str = "train", timeout: float = 300):
    """Like `run_job`, as a fork of a process that has imported everything (see `tests.support.forks`).

    Fails if the job has left processes behind.
    """
    return run_forked("trainer", forked_arguments(*overrides, job=job), cwd, environment(), timeout)


def start_forked_job(
    *overrides: str, cwd: Path, env: dict[str, str] | None = None, log: Path | None = None, job: str = "train"
) -> ForkedCommand:
    """Like `start_job`, as a fork of a process that has imported everything."""
    with contextlib.ExitStack() as stack:
        output = subprocess.PIPE if log is None else stack.enter_context(open(log, "w"))
        return fork_server().start(
            "tests.support.forks:run_module",
            *("trainer", *forked_arguments(*overrides, job=job)),
            cwd=cwd,
            env={**environment(), **(env or {})},
            stdout=output,
            prepare="tests.support.forks:import_engine",
        )


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "RAY_AUTH_MODE": "disabled"}


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def comparable(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Metrics without what a clock measured."""
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "perf/", "journal/"))} for row in rows]


def assert_close(rows: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    """Check that metrics are equal but for the order of float32 sums, as on another number of ranks."""
    assert [row["step"] for row in rows] == [row["step"] for row in others]
    for ours, theirs in zip(comparable(rows), comparable(others), strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            assert math.isclose(ours[name], value, rel_tol=1e-3, abs_tol=1e-5), (ours["step"], name, ours[name], value)


def family(pid: int) -> list[psutil.Process]:
    """A process and all that it has started."""
    parent = psutil.Process(pid)
    return [parent, *parent.children(recursive=True)]


def command_of(process: psutil.Process) -> str:
    """The command line of a process; empty if it has just ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())
    return ""


def is_engine(host: psutil.Process) -> bool:
    """Whether a process in which Ray hosts a rank or an engine of vLLM has an engine; false if it has just ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return "VLLM_LOGGING_LEVEL" in host.environ()
    return False


def members(pid: int) -> list[psutil.Process]:
    """The ranks and engines of a job, in the order in which they have started."""
    found = []
    for process in family(pid):
        with contextlib.suppress(psutil.Error):  # it has just ended
            if "ray::Host" in command_of(process) or process.name().startswith(("rank ", "engine ")):
                found.append(process)
    return sorted(found, key=lambda process: process.create_time())


def kill_all(processes: Iterable[psutil.Process]) -> None:
    send(processes, signal.SIGKILL)


def send(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    """Send a signal to those that still run."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def has_ended(pid: int) -> bool:
    """Whether a process has exited, even if nobody has reaped it: it has no memory any more."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def left_running(marker: str) -> list[str]:
    """Command lines of live processes whose environment holds `marker`: what a job has left behind."""
    left = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it has just ended, or belongs to somebody else
            if process.status() != psutil.STATUS_ZOMBIE and marker in process.environ().values():
                left.append(" ".join(process.cmdline()))
    return left


def left_in_shared_memory(before: set[str]) -> set[str]:
    """Names in shared memory that are not in `before`, and that no other live process has open or mapped.

    Other tests may have jobs and servers at this moment, and use theirs.
    """
    for _ in range(20):  # another process may have made a directory just now, and not opened it yet
        left = shared_memory() - before
        left -= _used_in_shared_memory() if left else set()
        if not left:
            break
        time.sleep(0.05)
    return left


def _used_in_shared_memory() -> set[str]:
    used = set()
    for pid in {*psutil.pids()} - {os.getpid()}:
        with contextlib.suppress(OSError):  # it has just ended
            mapped = [line.partition("/")[2] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
            opened = [os.readlink(entry.path)[1:] for entry in os.scandir(f"/proc/{pid}/fd")]
            used.update(path.split("/")[2] for path in mapped + opened if path.startswith("dev/shm/"))
    return used


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait. The time limit of the test ends a wait for something that never happens."""
    while not condition():
        time.sleep(0.02)


def shared_memory() -> set[str]:
    """What weights, Ray and vLLM may leave in shared memory; semaphores belong to the processes that run."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}
