"""`trainer compare RUN...`: a table of runs, and a picture of their curves."""

from __future__ import annotations

import argparse
import glob
import os
import sys
from dataclasses import dataclass
from typing import Any

from trainer.checkpoint import manifest as manifests
from trainer.checkpoint import record
from trainer.checkpoint.manifest import DamagedError
from trainer.checkpoint.parts import CONFIG_FILE, read_config
from trainer.checkpoint.store import open_store
from trainer.config import Config
from trainer.documents import parse_yaml
from trainer.errors import UserError
from trainer.metrics.best import Best, find_best
from trainer.metrics.tracker import METRICS_FILE, read_metrics
from trainer.output import escape, guard_output, show
from trainer.run.best import best_of

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


@dataclass(frozen=True)
class Run:
    """A run to compare."""

    path: str
    config: dict[str, Any]
    """By dotted key; empty if the run has not saved it yet."""
    rows: list[dict[str, Any]]

    @property
    def steps(self) -> int:
        return max((row["step"] for row in self.rows), default=0)


def read_run(path: str) -> Run:
    """Return the run in the directory `path`.

    Raises:
        UserError: there is none, or its files are damaged.
    """
    file = os.path.join(path, METRICS_FILE)
    if not os.path.exists(file):
        raise UserError(f"{path}: is no run directory; it has no {METRICS_FILE}")
    return Run(path, _flat(_config_of(path)), read_metrics(file))


def _config_of(path: str) -> dict[str, Any]:
    """Return the config in the run directory, or in the newest checkpoint that has one."""
    file = os.path.join(path, CONFIG_FILE)
    if os.path.exists(file):
        try:
            with open(file, "rb") as handle:
                return parse_yaml(handle.read(), {str: dict})
        except (OSError, ValueError) as error:
            raise UserError(f"{file}: cannot be read ({error})") from error
    store = open_store(record.read(path) or os.path.join(path, "checkpoints"))
    for step in reversed(store.steps()):
        try:
            return read_config(manifests.read(store.path(step)))
        except DamagedError:
            continue
    return {}


def differing_keys(runs: list[Run]) -> list[str]:
    """Return the config keys whose values differ between the runs and that matter for results."""
    known = [run.config for run in runs if run.config]
    keys = dict.fromkeys(key for config in known for key in config if not key.startswith(_PER_RUN))
    return [key for key in keys if len({repr(config.get(key)) for config in known}) > 1]


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
        raise UserError(f"{others[0] if others else paths[0]}: is no run directory; it has no {METRICS_FILE}")
    for path in others:
        show(f"left out {path}: it has no {METRICS_FILE}", error=True)
    return runs


def compare_runs(paths: list[str], picture: str, metric: str | None = None) -> None:
    """Print a table of runs, best first, and draw the curves of the metric.

    Args:
        picture: the PNG file to write.
        metric: None: the `trainer.best_metric` of the first run.
    """
    runs = [read_run(path) for path in find_runs(paths)]
    defaults = Config().trainer
    metric = metric or runs[0].config.get("trainer.best_metric", defaults.best_metric)
    mode = runs[0].config.get("trainer.best_mode", defaults.best_mode)
    best = {run.path: best_of(run.rows, metric, mode) for run in runs}
    found = {reached.metric for reached in best.values() if reached}
    if len(found) == 1:  # the mean reward, if no run has an accuracy above 0
        (metric,) = found
    else:
        best = {run.path: find_best(run.rows, metric, mode, of_training=True) for run in runs}
    runs.sort(key=lambda run: _rank(best[run.path], mode))
    _print_table(runs, metric, best)
    _draw(runs, metric, picture)
    show(f"curves: {picture}")


def _rank(best: Best | None, mode: str) -> tuple[bool, float]:
    return best is None, 0.0 if best is None else best.value * (-1 if mode == "max" else 1)


def _print_table(runs: list[Run], metric: str, best: dict[str, Best | None]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    keys = differing_keys(runs)
    table = Table()
    lasts = [key.rpartition(".")[2] for key in keys]
    # A long name makes a wide column: the last word stands for the key if it is the only such key.
    names = [last if lasts.count(last) == 1 else key for key, last in zip(keys, lasts, strict=True)]
    for name in ("run", *names):
        table.add_column(Text(escape(name, lines=False)), overflow="fold")
    for name in (f"best {metric}", "at step", "last", "steps"):
        table.add_column(Text(escape(name, lines=False)), justify="right", no_wrap=True)
    for run in runs:
        reached = best[run.path]
        last = next((row[metric] for row in reversed(run.rows) if row.get(metric) is not None), None)
        numbers = (f"{reached.value:.4g}", str(reached.step)) if reached else (_UNKNOWN, _UNKNOWN)
        settings = [str(run.config.get(key, _UNKNOWN)) for key in keys]
        cells = (_name(run), *settings, *numbers, _UNKNOWN if last is None else f"{last:.4g}", str(run.steps))
        table.add_row(*(Text(escape(cell, lines=False)) for cell in cells))
    # A file or a pipe has no width: no line is cut there.
    Console(file=sys.stdout, width=None if sys.stdout.isatty() else _WIDTH_OF_FILES).print(table)


def _name(run: Run) -> str:
    return os.path.basename(os.path.abspath(run.path))


def _draw(runs: list[Run], metric: str, picture: str) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for run in runs:
        points = [(row["step"], row[metric]) for row in run.rows if row.get(metric) is not None]
        steps, values = zip(*points, strict=True) if points else ((), ())
        axes.plot(steps, values, marker="o" if len(points) <= 20 else "", markersize=4, label=_name(run))
    axes.set(xlabel="step", ylabel=metric)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(True, color="#E6E6E6")
    if len(runs) <= 20:
        axes.legend(fontsize=8, frameon=False)
    figure.savefig(f"{picture}.tmp", format="png", dpi=130)
    pyplot.close(figure)
    os.replace(f"{picture}.tmp", picture)


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def main(argv: list[str] | None = None) -> int:
    """Compare the runs of the command line; returns the exit status."""
    guard_output()
    parser = argparse.ArgumentParser(prog="trainer compare", description="Compare runs.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directory, or directory of a sweep")
    parser.add_argument("--metric", help="metric to compare; default: trainer.best_metric of the first run")
    parser.add_argument("--out", default="compare.png", help="picture of the curves (default: %(default)s)")
    args = parser.parse_args(argv)
    try:
        compare_runs(args.runs, args.out, args.metric)
    except (UserError, OSError) as error:
        show(f"error: {error}", error=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
