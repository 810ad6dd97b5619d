"""What each start of a run was: `config.yaml` of the last start, and one line of `starts.jsonl` for each start."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import os
import platform
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from trainer import __version__
from trainer.config import Config, Metric
from trainer.errors import UserError
from trainer.files.appended import AppendedFile
from trainer.files.atomic_io import open_regular, write_file
from trainer.files.documents import Shape, dump_yaml, is_count, parse_object
from trainer.files.redaction import redact, redact_command
from trainer.metrics.tracker import METRICS_FILE
from trainer.process import time_limits
from trainer.process.log_setup import LOG_FILE

CONFIG_FILE = "config.yaml"
STARTS_FILE = "starts.jsonl"
LOG_NAME = "log.txt"
HOLDS_A_RUN = "already holds a run"
"""In the sentence about a start that was refused because the directory is not empty."""

_START: dict[Any, Shape] = {
    "command": [str],
    "directory": str,
    "task": {
        "name": str,
        "total_steps": is_count,
        "best_metric": str,
        "best_mode": str,
        "metrics": {str: {"meaning": str, "unit": str, "better": str, "panel": str, "watched": bool}},
    },
    "config": {"trainer": {"total_steps": is_count, "ckpt_path": str}},
}


def has_metrics(run_dir: str) -> bool:
    """Return whether a run has logged a step in a directory."""
    try:
        return os.path.getsize(os.path.join(run_dir, METRICS_FILE)) > 0
    except OSError:
        return False


def second_run(run_dir: str) -> UserError:
    """Return what refuses to start another run in the directory of one."""
    return UserError(
        f"trainer.run_dir={run_dir}: {HOLDS_A_RUN}; continue it with trainer.resume_mode=latest, or choose another "
        "trainer.run_name"
    )


def record_start(run_dir: str, cfg: Config, resumed_step: int | None = None) -> None:
    """Write `config.yaml`, and append a line to `starts.jsonl`. They hold no secrets (see `trainer.files.redaction`).
    `resumed_step`: step of the checkpoint of this run that it continues; None: it begins without one."""
    config = redact(dataclasses.asdict(cfg))
    command, task = redact_command(sys.orig_argv), RecordedTask.of(cfg)
    LOG_FILE.write(f"start of {shlex.join(command)}")
    start = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": command,
        "directory": os.getcwd(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "versions": versions(),
        "git": git_states([os.path.dirname(__file__), os.getcwd()]),
        "task": {**vars(task), "metrics": {name: metric._asdict() for name, metric in task.metrics.items()}},
        "resumed_step": resumed_step,
        "config": config,
    }
    write_file(os.path.join(run_dir, CONFIG_FILE), dump_yaml(config, allow_unicode=True))
    starts = AppendedFile(os.path.join(run_dir, STARTS_FILE))
    starts.append(json.dumps(start).encode() + b"\n")
    starts.sync()  # a job must not start on a full disk


@dataclass(frozen=True)
class RecordedTask:
    """What a start records of its task: reports read it without the code of the run."""

    name: str  # the value of `trainer.task`
    total_steps: int
    best_metric: str  # the metric that steps are compared by
    best_mode: str  # `max` or `min`
    metrics: Mapping[str, Metric]  # the task's own metrics

    @classmethod
    def of(cls, cfg: Config) -> RecordedTask:
        return cls(cfg.trainer.task, cfg.total_steps, *cfg.compared_by, cfg.task.metrics)

    @property
    def watched(self) -> tuple[str, ...]:
        """Its own metrics that are watched after a resume."""
        return tuple(name for name, metric in self.metrics.items() if metric.watched)


def task_of(start: Mapping[str, Any] | None) -> RecordedTask:
    """Return the task of a line of `starts.jsonl`; for None that of the default config, without a number of steps."""
    if start is None:
        return replace(RecordedTask.of(Config()), total_steps=0)
    metrics = {name: Metric(**metric) for name, metric in start["task"]["metrics"].items()}
    return RecordedTask(**{**start["task"], "metrics": metrics})


def last_start(run_dir: str) -> dict[str, Any] | None:
    """Return the last line of `starts.jsonl` that can be read; None if there is none."""
    return next(_starts(run_dir), None)


def starts_from(run_dir: str, step: int) -> list[dict[str, Any]]:
    """Return the last starts of a run that have all resumed from the checkpoint of `step`, and saved no newer one."""
    return list(takewhile(lambda start: start.get("resumed_step") == step, _starts(run_dir)))


def _starts(run_dir: str) -> Iterator[dict[str, Any]]:
    """Yield the lines of `starts.jsonl` that can be read, the last one first."""
    with contextlib.suppress(FileNotFoundError), open_regular(os.path.join(run_dir, STARTS_FILE)) as file:
        for line in reversed(file.read().splitlines()):
            with contextlib.suppress(ValueError):
                yield parse_object(line, _START)


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of Python and of all packages that are installed."""
    path = [entry for entry in sys.path if not entry.endswith("_vendor")]  # setuptools' own copies of packages
    packages = {}
    for one in importlib.metadata.distributions(path=path):  # their `name` and `version` parse the whole text
        text = one.read_text("METADATA") or one.read_text("PKG-INFO") or ""
        fields = dict(re.findall("^(Name|Version): *(.*)", text.partition("\n\n")[0], re.MULTILINE))
        packages |= {fields["Name"]: fields["Version"]} if len(fields) == 2 else {}
    packages.pop("trainer", None)  # an editable install keeps the number that it had when it was made
    ordered = sorted(packages.items(), key=lambda item: item[0].lower())
    return {"python": platform.python_version(), "trainer": __version__, **dict(ordered)}


def git_states(directories: list[str]) -> list[dict[str, Any]]:
    """Return directory, commit, and whether tracked files have changes, of the repositories that hold `directories`."""
    states: dict[str, dict[str, Any]] = {}
    for path in directories:
        with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
            directory, commit = _git(path, "rev-parse", "--show-toplevel", "HEAD").split("\n")
            if directory not in states:
                dirty = bool(_git(path, "status", "--porcelain", "--untracked-files=no"))
                states[directory] = {"directory": directory, "commit": commit, "dirty": dirty}
    return list(states.values())


def _git(path: str, *arguments: str) -> str:
    command = ["git", "-C", path, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=time_limits.GIT_S, check=True)
    return done.stdout.strip()
