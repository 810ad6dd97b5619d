"""A task that notes the processor time of each phase of a step, in all processes of the job."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import psutil

from trainer.config import TASKS, Config
from trainer.episodes import Episode
from trainer.metrics.timing import Timer
from trainer.metrics.tracker import METRICS_FILE, read_metrics
from trainer.sources.sampling import SamplingSource
from trainer.tasks import Task, rl

CPU_FILE = "cpu.jsonl"
DRIVER, RANK, ENGINE, REST = "driver", "rank", "engine", "rest"
WHOLE = "whole"
PHASES = {"rollout": "rollout", "logprob": "scores", "update": "update", "sync": "sync", WHOLE: WHOLE}
"""Phases of a run, and their names in a plan."""


def thread_seconds(pid: int) -> float:
    """Return the seconds of the processor that all threads of a process have taken, to the nanosecond."""
    total = 0
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                with open(f"/proc/{pid}/task/{thread}/schedstat") as file:
                    total += int(file.read().split()[0])
    return total / 1e9


def family() -> dict[int, str]:
    """Return the kind of each process of the job, by its number."""
    found = {os.getpid(): DRIVER}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            kind = process.name().partition(" ")[0]
            found[process.pid] = kind if kind in (RANK, ENGINE) else REST
    return found


class _Notes:
    """The phases that are timed while it is installed, with the seconds that they took, by kind of process.

    On a machine with a core for each process, ranks compute beside each other, as engines do. So the longest of each
    kind counts.
    """

    def __init__(self) -> None:
        self.processes: dict[int, str] = {}
        self.seconds: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))

    def install(self) -> None:
        timed = Timer.__call__

        @contextmanager
        def noted(timer: Timer, phase: str, **details: Any) -> Iterator[None]:
            before = self.now()
            try:
                with timed(timer, phase, **details):
                    yield
            finally:
                self.add(phase, before)

        Timer.__call__ = noted  # type: ignore[method-assign]

    def now(self) -> dict[int, float]:
        return {pid: thread_seconds(pid) for pid in self.processes}

    def add(self, phase: str, before: dict[int, float]) -> None:
        """Note what has passed since `before`."""
        longest: dict[str, float] = defaultdict(float)
        for pid, seconds in self.now().items():
            kind = self.processes[pid]
            longest[kind] = max(longest[kind], seconds - before.get(pid, seconds))
        for kind, seconds in longest.items():
            self.seconds[phase][kind] += seconds


_NOTES = _Notes()


class NotingSource(SamplingSource):
    """Writes the notes of the step before at the begin of each step."""

    _last: dict[int, float] | None = None

    def next(self, step: int) -> list[Episode]:
        if self._last is not None:
            _NOTES.add(WHOLE, self._last)
            line = {"step": step - 1, **{name: _NOTES.seconds[phase] for phase, name in PHASES.items()}}
            with open(os.path.join(self.cfg.trainer.run_dir, CPU_FILE), "a") as file:
                print(json.dumps(line), file=file)
        _NOTES.seconds.clear()
        _NOTES.processes = family()
        self._last = _NOTES.now()
        return super().next(step)


def build(cfg: Config) -> Task:
    _NOTES.install()
    return rl.build(cfg, partial(rl.sample_episodes, make_source=NotingSource))


TASK = replace(TASKS["rl"], build=build)


@dataclass(frozen=True)
class Measured:
    """The steps of a job: medians."""

    phases: dict[str, float]
    """Seconds of the processor, by the name of the phase in a plan, and of the whole step."""
    kinds: dict[str, float]
    """The same of the phases, by kind of process."""
    tokens: float
    """Of a prompt and its completion."""
    response: float
    """Of a completion."""
    longest: float
    """Tokens of the longest completion of a step."""


def run_job(run_dir: str, steps: int, overrides: Sequence[str]) -> Measured:
    """Run a job, and return what its steps took.

    The first step, in which everything is new, does not count.
    """
    command = [
        sys.executable, "-m", "trainer", "train", "trainer.task=benchmarks.phases:TASK", f"trainer.run_dir={run_dir}",
        f"trainer.total_steps={steps + 2}", "trainer.val_interval=-1", "trainer.ckpt_interval=1000",
        "trainer.ray_address=processes", "logger.plot=false", *overrides,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise SystemExit(f"{done.stdout[-2000:]}{done.stderr[-2000:]}\n{' '.join(command)} ended with an error")
    with open(os.path.join(run_dir, CPU_FILE)) as file:
        lines = [json.loads(line) for line in file][1:]
    rows = [row for row in read_metrics(os.path.join(run_dir, METRICS_FILE)) if row["step"] > 1]
    return Measured(
        {name: median(sum(line[name].values()) for line in lines) for name in PHASES.values()},
        {
            kind: median(sum(line[n].get(kind, 0.0) for n in PHASES.values() if n != WHOLE) for line in lines)
            for kind in (DRIVER, RANK, ENGINE, REST)
        },
        median(row["progress/tokens"] / row["progress/samples"] for row in rows),
        median(row["response_length/mean"] for row in rows),
        median(row["response_length/max"] for row in rows),
    )
