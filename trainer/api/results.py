"""What a run has left behind: metrics, best value, checkpoints, exports, report."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from glob import escape, glob
from typing import TYPE_CHECKING, Any

from trainer.checkpoint.manifest import step_in
from trainer.checkpoint.store import open_store
from trainer.errors import UserError
from trainer.metrics import tracker
from trainer.metrics.best import Best, find_best

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class RunResult:
    """The result of a run, as it is on disk when `train` returns."""

    run_dir: str
    """Directory of the run."""
    status: str
    """`finished`, or `stopped`: the run was saved early, and the same call continues it."""
    best: Best | None
    """The best value of `trainer.best_metric`, with its step; None if no step has measured it."""
    checkpoints: list[str]
    """The checkpoints, oldest first."""
    exports: list[str]
    """The exported policies in Hugging Face format, oldest first."""
    report: str | None
    """The picture of the metrics."""
    rows: Sequence[dict[str, Any]] = field(repr=False)
    """The lines of `metrics.jsonl`, read when they are used."""

    @property
    def metrics(self) -> pandas.DataFrame:
        """The metrics: one row for each step, one column for each metric, and the column `step`."""
        return _as_table(self.rows)


def describe_result(paths: dict[str, str], status: str) -> RunResult:
    """Return the result of a run.

    Args:
        paths: `run_dir`, `ckpt_path` and `export_path` of its config; `best_metric` and `best_mode`: of the comparison.
        status: `finished` or `stopped`.
    """
    run_dir = paths["run_dir"]
    rows = tracker.MetricsLines(os.path.join(run_dir, tracker.METRICS_FILE))
    best = find_best(rows.having(paths["best_metric"]), paths["best_metric"], paths["best_mode"])
    checkpoints = open_store(paths["ckpt_path"])
    exports = glob(os.path.join(escape(paths["export_path"]), "global_step_*", "policy"))
    report = os.path.join(run_dir, "report.png")
    return RunResult(
        run_dir=run_dir,
        status=status,
        best=best,
        checkpoints=[checkpoints.path(step) for step in checkpoints.steps()],
        exports=sorted(exports, key=lambda path: step_in(os.path.dirname(path)) or 0),
        report=report if os.path.exists(report) else None,
        rows=rows,
    )


def read_metrics(run: str | os.PathLike[str]) -> pandas.DataFrame:
    """Return the metrics of a run as a table: one row for each step, one column for each metric, and `step`.

    The run may still be running.

    Raises:
        UserError: there are no metrics, or a line of them is damaged.
    """
    path = os.fspath(run)
    file = os.path.join(path, tracker.METRICS_FILE) if os.path.isdir(path) else path
    if not os.path.exists(file):
        raise UserError(f"{path}: no metrics are there; name a run directory, which holds {tracker.METRICS_FILE}")
    return _as_table(tracker.MetricsLines(file))


def _as_table(rows: Sequence[dict[str, Any]]) -> pandas.DataFrame:
    import pandas

    table = pandas.DataFrame(list(rows))
    return table[sorted(table, key=lambda name: (name != "step", name))]
