"""The picture of a run: `trainer report RUN_DIR` draws `RUN_DIR/report.png`, for a sweep that of each run."""

from __future__ import annotations

import logging
import math
import os
import re
import shlex
import textwrap
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING

from trainer.config import Metric
from trainer.config.tasks import ACCURACY
from trainer.errors import UserError, describe_error
from trainer.metrics.advice import current_advice
from trainer.metrics.best import find_best
from trainer.metrics.names import PHASES, is_accuracy_of_set, pass_at
from trainer.metrics.tracker import METRICS_FILE, MetricsLines
from trainer.process.failures import INFRASTRUCTURE, JOB, read_incidents
from trainer.process.log_setup import ToolParser, encodable, run_tool, show
from trainer.reports import drawing
from trainer.reports.compare import find_runs
from trainer.reports.drawing import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, SKY, YELLOW, Panel, Rows, curve, number
from trainer.run.run_metadata import last_start, task_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOG = logging.getLogger(__name__)
_COLUMNS = 3
_LETTERS, _LINE_INCHES = 70, 0.17
"""Letters of the text below the panels that fit below one of them, and the height of a line."""
_PHASE_COLOURS = dict(zip(PHASES, (BLUE, YELLOW, ORANGE, SKY, GREEN, PURPLE, RED), strict=True))
_INCIDENT_COLOURS = {JOB: RED, INFRASTRUCTURE: "black"}


def write_report(run_dir: str, out: str | None = None) -> str:
    """Draw the metrics of `{run_dir}/metrics.jsonl`, with the advisories that hold after the last step, to `out` or
    `report.png`; return the path. Raises UserError: there are no metrics."""
    source = os.path.join(run_dir, METRICS_FILE)
    if not os.path.exists(source):
        raise UserError(f"{source} does not exist; give the directory of a run")
    lines = MetricsLines(source)
    best = find_best(lines.having(ACCURACY), ACCURACY, "max")
    rows = lines.thinned(drawing.MOST_POINTS, [best.step] if best else [])
    incidents = read_incidents(run_dir)
    start = last_start(run_dir)
    task = task_of(start)
    panels = _panels(rows, task.metrics)
    if not panels:
        raise UserError(f"{source} has nothing to draw yet")
    path = out or os.path.join(run_dir, "report.png")
    height, columns = math.ceil(len(panels) / _COLUMNS), min(_COLUMNS, len(panels))
    advice = current_advice(lines, start["config"] if start else {})
    notes = [line for one in advice for line in textwrap.wrap(f"NOTE: {one}", _LETTERS * columns)]
    marks = sorted({(incident.step, incident.kind) for incident in incidents})
    inches = 3.3 * height + 0.4 + _LINE_INCHES * len(notes)
    with drawing.picture(path, 5.2 * columns, inches) as figure:
        grid = figure.add_gridspec(height, columns)
        for i, panel in enumerate(panels):
            row, column = divmod(i, columns)
            # The last panel fills the rest of its row.
            axes = figure.add_subplot(grid[row, column:] if i == len(panels) - 1 else grid[row, column])
            panel(axes, rows)
            for step, kind in marks:
                colour = _INCIDENT_COLOURS.get(kind, GREY)
                axes.axvline(step - 0.5, color=colour, linestyle=":", linewidth=1.0, gid=f"incident {step}")
            drawing.label_steps(axes)
            axes.set_xlim(rows[0]["step"] - 0.5, rows[-1]["step"] + 0.5)
        name = encodable(os.path.basename(os.path.abspath(run_dir)))
        dotted = f", {len(incidents)} incident(s) (dotted; red: the job's own)" if incidents else ""
        if notes:
            figure.supxlabel("\n".join(notes), x=0.01, ha="left", fontsize=9)
        figure.suptitle(f"{name} after step {rows[-1]['step']}{dotted}", fontweight="bold")
    return path


def final_report(run_dir: str) -> None:
    """Draw the report of a finished run. Log where it is, or why it could not be drawn."""
    try:
        LOG.info("report: %s", write_report(run_dir))
    except Exception as error:  # whatever matplotlib raises: the run is finished, and a picture must not make it fail
        reason = str(error) if isinstance(error, (OSError, UserError)) else describe_error(error)
        LOG.warning("no report was drawn (%s); `trainer report %s` draws it", reason, shlex.quote(run_dir))


def _panels(rows: Rows, declared: Mapping[str, Metric]) -> list[Panel]:
    """Return the panels whose metrics the run has logged. `declared` are those of its task."""
    logged = {name for row in rows for name, value in row.items() if value is not None}
    possible = [*_OF_SAMPLES, *_task_panels(declared, logged), *_PANELS]
    panels = [panel for name, panel in possible if name in logged]
    means = sorted(name for name in logged if name.endswith("/mean"))
    terms = [name for name in means if re.fullmatch(r"reward/.+/mean", name)]
    pairs = [(row.get(terms[0]), row.get("reward/mean")) for row in rows] if len(terms) == 1 else []
    if terms and not (pairs and all(None in pair or math.isclose(*pair, rel_tol=1e-6) for pair in pairs)):
        panels.append(partial(_family, names=terms, title="Terms of the reward", unit="reward"))
    sets = sorted(name for name in logged if is_accuracy_of_set(name))
    if sets:
        panels.append(partial(_family, names=sets, title="Validation sets", unit="accuracy"))
    # Tokens are on another scale.
    counts = [name for name in means if re.fullmatch(r"episode/(?!tokens/mean).+/mean", name)]
    if counts:
        panels.append(partial(_family, names=counts, title="Episodes", unit="mean of an episode"))
    return panels


def _reward(axes: Axes, rows: Rows) -> None:
    curve(axes, rows, "reward/mean", "training, mean", BLUE)
    spread = [row for row in rows if None not in (row.get("reward/mean"), row.get("reward/std"))]
    pairs = [(row["reward/mean"], row["reward/std"]) for row in spread]
    # Values from 0 to 1 have at most this variance (Bhatia and Davis, 2000): more means that the rewards pass a bound.
    are_shares = all(std**2 <= mean * (1 - mean) + 1e-6 for mean, std in pairs)
    least, most = (0.0, 1.0) if are_shares else (-math.inf, math.inf)
    low = [max(least, mean - std) for mean, std in pairs]
    high = [min(most, mean + std) for mean, std in pairs]
    steps = [row["step"] for row in spread]
    axes.fill_between(steps, low, high, color=BLUE, alpha=0.15, linewidth=0, label="± standard deviation")
    curve(axes, rows, "val/reward/mean", "validation, greedy", ORANGE)
    axes.set(title="Reward", ylabel="reward")
    axes.legend()


def _accuracy(axes: Axes, rows: Rows) -> None:
    passes = sorted({name for row in rows for name in row if name.startswith(pass_at(""))})  # a resume may change k
    colours = zip(passes, cycle((PURPLE, GREEN, SKY, RED)))  # noqa: B905, the colours do not end
    values = drawing.series(rows, ACCURACY)[1]
    best = max((value for value in values if not math.isnan(value)), default=math.nan)
    title = f"Validation accuracy: first {values[0]:.3f}, best {best:.3f}, last {values[-1]:.3f}"
    more = [(name, name.removeprefix("val/"), colour) for name, colour in colours]
    _curves(axes, rows, title, "share of successes", [(ACCURACY, "greedy", ORANGE), *more])
    drawing.share_axis(axes)


def _length(axes: Axes, rows: Rows) -> None:
    curves = (("response_length/max", "longest", SKY), ("response_length/mean", "mean", BLUE))
    _curves(axes, rows, "Response length", "tokens", curves)
    axes.set_ylim(bottom=0)


def _task_panels(declared: Mapping[str, Metric], logged: Collection[str]) -> list[tuple[str, Panel]]:
    """Return entries of `_PANELS` for the logged metrics that a task declares with a panel."""
    panels = []
    for title in dict.fromkeys(metric.panel for metric in declared.values() if metric.panel):
        titled = [name for name, metric in declared.items() if metric.panel == title]
        labels = ["validation" if name.startswith("val/") else "training" for name in titled]
        if len(set(labels)) < len(labels):
            labels = titled
        curves = list(zip(titled, labels, (BLUE, ORANGE, GREEN, RED, PURPLE), strict=False))
        panel = partial(_curves, title=title, unit=declared[titled[0]].unit, curves=curves)
        panels += [(name, panel) for name in titled if name in logged][:1]
    return panels


def _curves(axes: Axes, rows: Rows, title: str, unit: str, curves: Sequence[tuple[str, str, str]]) -> None:
    """Draw those of the metrics (name, label and colour of each) that were logged. A legend tells several apart."""
    logged = [one for one in curves if any(row.get(one[0]) is not None for row in rows)]
    for name, label, colour in logged:
        curve(axes, rows, name, label, colour)
    axes.set(title=title, ylabel=unit)
    if len(logged) > 1:
        axes.legend()


def _single(name: str, title: str, unit: str, colour: str) -> tuple[str, Panel]:
    return name, lambda axes, rows: _curves(axes, rows, title, unit, [(name, "", colour)])


def _family(axes: Axes, rows: Rows, names: Sequence[str], title: str, unit: str) -> None:
    """Draw the first metrics of a family, as many as colours can tell apart."""
    colours = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY, YELLOW, GREY)
    for name, colour in zip(names, colours, strict=False):
        label = name.partition("/")[2].removesuffix("/mean").removesuffix("/accuracy")
        curve(axes, rows, name, label, colour)
    hidden = len(names) - len(colours)
    axes.legend(title=f"and {hidden} more, not drawn" if hidden > 0 else None)
    axes.set(title=title, ylabel=unit)
    if unit == "accuracy":
        drawing.share_axis(axes)


def _time(axes: Axes, rows: Rows) -> None:
    """Stack the seconds of the phases, with the rest of `time/step` on top."""
    timed = [row for row in rows if row.get("time/step") is not None]
    edges = [timed[0]["step"] - 0.5, *(row["step"] + 0.5 for row in timed)]
    base = [0.0] * len(timed)
    for phase in PHASES:
        seconds = [number(row.get(f"time/{phase}", 0.0)) for row in timed]
        if any(seconds):
            top = [b + s for b, s in zip(base, seconds, strict=True)]
            label, colour = phase.replace("_", " "), _PHASE_COLOURS[phase]
            axes.stairs(top, edges, baseline=base, fill=True, color=colour, label=label)
            base = top
    top = [max(b, row["time/step"]) for b, row in zip(base, timed, strict=True)]
    axes.stairs(top, edges, baseline=base, fill=True, color=GREY, label="rest")
    axes.set(title="Time per step", ylabel="seconds")
    # Leave space for the legend, which covers the right part. Above a first step that is much slower there is enough.
    axes.set_ylim(0, max(1.05 * max(top), 1.6 * max(top[len(top) // 5 :])))
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="upper right", ncols=3)


# The metric that a panel needs, and the panel. Those of the task stand between the two lists.
_OF_SAMPLES: tuple[tuple[str, Panel], ...] = (
    ("reward/mean", _reward),
    (ACCURACY, _accuracy),
    ("response_length/mean", _length),
)
_PANELS: tuple[tuple[str, Panel], ...] = (
    _single("policy/kl", "KL", "nats a token", RED),
    _single("policy/entropy", "Entropy", "nats a token", GREEN),
    _single("critic/explained_variance", "Critic: explained variance", "1", PURPLE),
    ("time/step", _time),
)


def main(argv: list[str] | None = None) -> int:
    parser = ToolParser(prog="trainer report", description="Draw RUN_DIR/report.png.")
    help = "directory of a run, or of several, such as a sweep: then each gets its own picture"
    parser.add_argument("run_dir", metavar="RUN_DIR", help=help)
    parser.add_argument("--out", help="another file for the picture, for example of a run that you may only read")
    return run_tool(parser, lambda args: _write_reports(args.run_dir, args.out), argv)


def _write_reports(directory: str, out: str | None) -> None:
    runs = find_runs([directory])
    if len(runs) > 1 and out is not None:
        raise UserError(f"--out={out}: is one picture, and {directory} holds {len(runs)} runs; name one of them")
    failures = []
    for run in runs:
        try:
            show(write_report(run, out))
        except UserError as error:
            failures.append(error)
            if len(failures) == len(runs):
                raise
            show(f"left out {error}", error=True)
