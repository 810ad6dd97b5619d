"""What the page shows of a run besides its episodes: curves, marks on them, starts, config, advice."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.checkpoint.inspection import find_store
from trainer.errors import UserError
from trainer.metrics.advice import Advisor
from trainer.metrics.names import declared_as
from trainer.process.failures import read_incidents
from trainer.reports.compare import Run
from trainer.run.run_metadata import LOG_NAME, STARTS_FILE

_RESUMED = re.compile(r"^(\S+ \S+) ((?:resumed|forked) from .*, step (\d+) of \d+)$")
_MOST_MARKS = 1000


def describe_run(run: Run, name: str) -> dict[str, Any]:
    """Return what the page shows of a run, as JSON values.

    Raises:
        UserError: a file of the run is damaged.
    """
    return {
        "name": name,
        "path": os.path.abspath(run.path),
        "task": run.task.name,
        "total_steps": run.task.total_steps,
        "step": run.steps,
        "compared": [run.task.best_metric, run.task.best_mode],
        "curves": curves(run.drawn),
        "marks": _marks(run.path),
        "starts": _starts(run.path),
        "config": {
            key: value if isinstance(value, str) else json.dumps(value, default=str)
            for key, value in run.config.items()
        },
        "advice": [
            {"steps": list(one.steps), "text": one.text, "key": one.key}
            for one in Advisor(run.config, history=run.rows).found
        ],
    }


def curves(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the steps and the values of each metric. None is a number that was not finite."""
    found: dict[str, list[Any]] = defaultdict(lambda: [[], []])
    for row in rows:
        for name, value in row.items():
            if name != "step":
                steps, values = found[name]
                steps.append(row["step"])
                values.append(value if value is None or isinstance(value, int) else float(f"{value:.6g}"))
    return dict(sorted(found.items()))


def describe_metrics(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Return the unit and the meaning of each metric that the runs have logged."""
    of_tasks = {name: metric for run in runs for name, metric in run.task.metrics.items()}
    logged = sorted({name for run in runs for row in run.drawn for name in row})
    known = [(name, of_tasks.get(name) or declared_as(name)) for name in logged]
    return {name: [metric.unit, metric.meaning] for name, metric in known if metric is not None}


def _marks(run_dir: str) -> list[dict[str, Any]]:
    """Return what happened at which step: restarts, incidents, checkpoints."""
    marks = [
        {
            "kind": "incident",
            "step": one.step,
            "time": one.time[:19],
            "who": f"{one.name} on {one.node}" if one.node else one.name,
            "class": one.kind,
            "text": f"{one.cause}; {one.action}; {one.text}",
        }
        for one in read_incidents(run_dir)[-_MOST_MARKS:]
    ]
    with contextlib.suppress(OSError), open(os.path.join(run_dir, LOG_NAME), errors="replace") as file:
        for line in file:
            if " from " in line and (match := _RESUMED.match(line.rstrip("\n"))):
                marks.append({"kind": "restart", "step": int(match[3]), "time": match[1], "text": match[2]})
    with contextlib.suppress(OSError, UserError):  # checkpoints in an object store that cannot be reached
        store = find_store(run_dir)
        for step in store.steps() if store is not None else []:
            marks.append({"kind": "checkpoint", "step": step, "text": store.path(step)})
    return marks


def _starts(run_dir: str) -> list[dict[str, Any]]:
    """Return time, command, host and commit of each start. Lines that cannot be read are left out."""
    starts = []
    with contextlib.suppress(OSError), open(os.path.join(run_dir, STARTS_FILE), "rb") as file:
        for line in file:
            with contextlib.suppress(ValueError, KeyError, TypeError, IndexError):
                start = json.loads(line)
                commits = [f"{git['commit'][:12]}{' with changes' if git['dirty'] else ''}" for git in start["git"][:1]]
                command = shlex.join(map(str, start["command"]))
                starts.append({"time": start["time"][:19], "command": command, "host": start["host"], "git": commits})
    return starts[-_MOST_MARKS:]
