"""The task of a run, as its directory records it: reports read it without the code of the run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from trainer.config import TASKS, Config, Metric, with_new_names
from trainer.files.documents import Shape, is_count, mismatch, parse_object
from trainer.run.next_command import command_of
from trainer.run.run_metadata import STARTS_FILE

_START: dict[Any, Shape] = {
    "command": [str],
    "directory": str,
    "config": {"trainer": {"total_steps": is_count, "ckpt_path": str}},
}
_TASK: dict[Any, Shape] = {
    "name": str,
    "total_steps": is_count,
    "best_metric": str,
    "best_mode": str,
    "metrics": {str: {"meaning": str, "unit": str, "better": str, "panel": str, "watched": bool}},
}


@dataclass(frozen=True)
class RecordedTask:
    """The task that a run directory records."""

    name: str
    """The value of `trainer.task`."""
    total_steps: int
    best_metric: str
    """The metric that steps are compared by."""
    best_mode: str
    """`max` or `min`."""
    metrics: Mapping[str, Metric]
    """The task's own metrics."""

    @property
    def watched(self) -> tuple[str, ...]:
        """Its own metrics that are watched after a resume."""
        return tuple(name for name, metric in self.metrics.items() if metric.watched)


def last_start(run_dir: str) -> dict[str, Any] | None:
    """Return the last line of `starts.jsonl` that can be read; None if there is none."""
    return next(_starts(run_dir), None)


def starts_from(run_dir: str, step: int) -> list[dict[str, Any]]:
    """Return the last starts of a run that have all resumed from the checkpoint of `step`, and saved no newer one."""
    return list(takewhile(lambda start: start.get("resumed_step") == step, _starts(run_dir)))


def _starts(run_dir: str) -> Iterator[dict[str, Any]]:
    """Yield the lines of `starts.jsonl` that can be read, the last one first."""
    with contextlib.suppress(FileNotFoundError), open(os.path.join(run_dir, STARTS_FILE), "rb") as file:
        for line in reversed(file.read().splitlines()):
            with contextlib.suppress(ValueError):
                start = parse_object(line, _START)
                yield start | {"config": with_new_names(start["config"])}


def recorded_task(start: Mapping[str, Any], rows: Iterable[Mapping[str, Any]]) -> RecordedTask:
    """Return the task of a run.

    Args:
        start: a line of `starts.jsonl`; or `{"config": …}` alone if there is none.
        rows: the lines of `metrics.jsonl`. They tell the task of runs of versions that recorded none.
    """
    task = start.get("task")
    if task is not None and mismatch(task, _TASK) is None:
        metrics = {name: Metric(**metric) for name, metric in task["metrics"].items()}
        return RecordedTask(**{**{name: task[name] for name in _TASK}, "metrics": metrics})
    config = start["config"]
    name = _value(config, "trainer.task", str) or _earlier_task(start.get("command", ()), rows)
    spec, defaults = TASKS.get(name, TASKS["rl"]), Config().trainer
    steps = _value(config, spec.total_steps, int) or _value(config, "trainer.total_steps", int) or 0
    metric = _value(config, "trainer.best_metric", str) or defaults.best_metric
    mode = _value(config, "trainer.best_mode", str) or defaults.best_mode
    return RecordedTask(name, steps, *spec.compared_by(metric, mode), spec.metrics)


def _earlier_task(command: Iterable[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the task of a run of a version that had two kinds of training, and named neither."""
    is_sft = command_of(list(command))[:2] == ["trainer", "sft"] or any("sft/loss" in row for row in rows)
    return "sft" if is_sft else "rl"


def _value(config: Any, key: str, kind: type) -> Any:
    """Return the value of a dotted key of a nested config; None if it has none of this type."""
    for part in key.split("."):
        config = config.get(part) if isinstance(config, Mapping) else None
    return config if type(config) is kind else None
