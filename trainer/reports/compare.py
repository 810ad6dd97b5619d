"""`trainer compare RUN...`: a table of runs, and a picture of their curves."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import sys
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from trainer.checkpoint.components import CONFIG_FILE
from trainer.config.tasks import ACCURACY
from trainer.errors import UserError, did_you_mean, sentence_of
from trainer.files.documents import flatten, parse_yaml
from trainer.files.redaction import redact
from trainer.metrics.best import find_best
from trainer.metrics.estimates import share_estimate
from trainer.metrics.names import METRICS
from trainer.metrics.tracker import METRICS_FILE, MetricsLines
from trainer.process.log_setup import ToolParser, encodable, escape, run_tool, show
from trainer.reports.drawing import MOST_POINTS, Rows, curve, label_steps, picture, series, share_axis
from trainer.run.run_metadata import STARTS_FILE, RecordedTask, last_start, task_of

_PER_RUN = (
    "trainer.run_name",
    "trainer.run_dir",
    "trainer.ckpt_path",
    "trainer.export_path",
    "trainer.resume_",
    "trainer.allow_config_change",
    "logger.",
)
"""Keys that differ between runs without a meaning for their results."""
_UNKNOWN = "-"
_WIDTH_OF_FILES = 1000
_MOST_KEYS = 12
_FEW = 8
_MOST_NAMES = 20  # runs that a legend can name


@dataclass(frozen=True)
class Run:
    path: str
    config: dict[str, Any]  # by dotted key; empty if the run has not saved it yet
    rows: MetricsLines
    task: RecordedTask
    command: list[str]  # words of the last start; empty if they are not known

    @property
    def name(self) -> str:
        return os.path.basename(os.path.abspath(self.path))

    @property
    def steps(self) -> int:
        return max(self.rows.steps, default=0)

    @cached_property
    def drawn(self) -> Rows:
        metric = self.task.best_metric
        best = find_best(self.rows.having(metric), metric, self.task.best_mode)
        return self.rows.thinned(MOST_POINTS, [best.step] if best else [])


def read_run(path: str) -> Run:
    """Return the run in the directory `path`. Raises UserError: there is none, or its files are damaged."""
    file = os.path.join(path, METRICS_FILE)
    if not os.path.exists(file):
        raise UserError(_no_run(path))
    config: dict[str, Any] = {}
    try:
        with contextlib.suppress(FileNotFoundError), open(os.path.join(path, CONFIG_FILE), "rb") as handle:
            config = redact(parse_yaml(handle.read(), {str: dict}))
    except (OSError, ValueError) as error:
        raise UserError(f"{os.path.join(path, CONFIG_FILE)}: cannot be read ({error})") from error
    start = last_start(path)
    return Run(path, flatten(config), MetricsLines(file), task_of(start), start["command"] if start else [])


def differing_keys(runs: list[Run]) -> list[str]:
    """Return the config keys whose values differ between the runs and that matter for results."""
    configs = [run.config for run in runs if run.config]
    keys = dict.fromkeys(key for config in configs for key in config if not key.startswith(_PER_RUN))
    return [key for key in keys if len({repr(config.get(key)) for config in configs}) > 1]


def _no_run(path: str) -> str:
    if not os.path.exists(path):
        return f"{path}: no such directory"
    if os.path.exists(os.path.join(path, STARTS_FILE)):
        return f"{path}: its run has logged no step yet; try again when it has"
    return f"{path}: is no run directory; it has no {METRICS_FILE}"


def find_runs(paths: list[str]) -> list[str]:
    """Return the run directories among `paths`, and those in the directories that hold several, such as a sweep.

    Other files are left out, and so are directories without metrics, with a line that names them: `sweep/*` names both.

    Raises:
        UserError: no run is left.
    """
    runs, others = [], []
    for path in paths:
        inside = glob.glob(os.path.join(glob.escape(path), "*", METRICS_FILE))
        if os.path.exists(os.path.join(path, METRICS_FILE)):
            runs.append(path)
        elif inside:
            runs += sorted(os.path.dirname(file) for file in inside)
        elif not os.path.isfile(path):
            others.append(path)
    if not runs:
        raise UserError(_no_run(others[0] if others else paths[0]))
    for path in others:
        show(f"left out {_no_run(path)}", error=True)
    return runs


def compare_runs(paths: list[str], out: str | None, metric: str | None = None, as_json: bool = False) -> None:
    """Print a table of runs, best first, and draw the curves of the metric.

    Args:
        out: the PNG file to write; None: `compare.png`, if it can be written, and none with `as_json`.
        metric: None: the `trainer.best_metric` of the first run.
        as_json: print JSON, and no table.

    Raises:
        UserError: there is no run, or none has logged the metric.
    """
    runs = [read_run(path) for path in find_runs(paths)]
    if metric is not None and not any(metric in row for run in runs for row in run.rows.having(metric)):
        logged = {name for run in runs for row in run.rows for name in row if name != "step"}
        meant = did_you_mean(metric, logged) or f"they have {_listed(sorted(logged))}"
        raise UserError(f"--metric={metric}: no run has logged it; {meant}")
    task = runs[0].task
    declared = {**METRICS, **task.metrics}.get(metric or "")
    mode = (declared.better if declared else "") or "max"
    if metric in (None, task.best_metric):
        metric, mode = task.best_metric, task.best_mode
    best, last = {}, {}
    for run in runs:
        measured = [row for row in run.rows.having(metric) if row.get(metric) is not None]
        best[run.path] = find_best(measured, metric, mode)
        last[run.path] = measured[-1][metric] if measured else None

    def rank(run: Run) -> tuple[bool, float, float]:
        # Runs with the same start, which they have not beaten, are ordered by their last value.
        sign, found = -1 if mode == "max" else 1, best[run.path]
        return found is None, sign * (found.value if found else 0.0), sign * (last[run.path] or 0.0)

    runs.sort(key=rank)
    keys = differing_keys(runs)
    # The keys that a command of the runs names come first.
    named = {word.partition("=")[0].lstrip("+") for run in runs for word in run.command}
    shown = keys if as_json else sorted(keys, key=lambda key: key not in named)[:_MOST_KEYS]
    rows = [
        {"run": run.name}
        | {key: run.config.get(key, _UNKNOWN) for key in keys if key in shown}
        | {"start": one and one.start, f"best {metric}": one and one.value, "at step": one and one.step}
        | {"last": last[run.path], "steps": run.steps}
        for run, one in ((run, best[run.path]) for run in runs)
    ]
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        _print_table(rows, [key for key in keys if key in shown])
        if left_out := [key for key in keys if key not in shown]:
            show(f"{len(left_out)} more keys differ ({_listed(left_out)}); --json has all")
    if out is None and as_json:
        return
    try:
        _draw(runs, metric, out or "compare.png")
    except OSError as error:
        if out is not None:
            raise
        show(f"the curves were not drawn ({sentence_of(error)}); name a file with --out", error=True)
    else:
        if not as_json:
            show(f"curves: {out or 'compare.png'}")


def _listed(names: Collection[str]) -> str:
    few = list(names)[:_FEW]
    return ", ".join(few) + (", …" if len(names) > len(few) else "")


def _print_table(rows: list[dict[str, Any]], keys: list[str]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table()
    lasts = [".".join(key.split(".")[-2:]) for key in keys]
    # A long name makes a wide column: the last two words stand for the key if no other column has them.
    taken = [*lasts, *rows[0]]
    short = {key: last if taken.count(last) == 1 else key for key, last in zip(keys, lasts, strict=True)}
    texts = {"run", *keys}
    for name in rows[0]:
        title = Text(escape(short.get(name, name), lines=False))
        table.add_column(title, **({"overflow": "fold"} if name in texts else {"justify": "right", "no_wrap": True}))
    for row in rows:
        cells = (str(value) if name in texts else _as_text(value) for name, value in row.items())
        table.add_row(*(Text(escape(cell, lines=False)) for cell in cells))
    # A file or a pipe has no width: no line is cut there.
    Console(file=sys.stdout, width=None if sys.stdout.isatty() else _WIDTH_OF_FILES).print(table)


def _as_text(value: float | None) -> str:
    return _UNKNOWN if value is None else str(value) if isinstance(value, int) else f"{value:.4g}"


def _draw(runs: list[Run], metric: str, path: str) -> None:
    with picture(path, 8, 5) as figure:
        axes = figure.add_subplot()
        for run in runs:
            curve(axes, run.drawn, metric, encodable(run.name))
            rows = run.config.get("data.val_size")
            if metric == ACCURACY and isinstance(rows, int) and rows > 0:  # of a file, nobody has written how many
                steps, values = series(run.drawn, metric)
                bounds = [share_estimate(value, rows) for value in values]
                band = [one.low for one in bounds], [one.high for one in bounds]
                axes.fill_between(steps, *band, color=axes.lines[-1].get_color(), alpha=0.12, linewidth=0)
        if metric == ACCURACY:
            axes.set_title("Share of successes; bands: 95 % intervals over the rows of data.val_size", fontsize=9)
            share_axis(axes)
        label_steps(axes)
        axes.set_ylabel(metric)
        if len(runs) <= _MOST_NAMES:
            axes.legend()


def main(argv: list[str] | None = None) -> int:
    parser = ToolParser(prog="trainer compare", description="Compare runs.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directory, or directory of a sweep")
    parser.add_argument("--metric", help="metric to compare; default: trainer.best_metric of the first run")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--out", help="picture of the curves (default: compare.png, none with --json)")
    return run_tool(parser, lambda args: compare_runs(args.runs, args.out, args.metric, args.json), argv)
