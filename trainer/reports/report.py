"""The picture of a run: `trainer report RUN_DIR` draws `RUN_DIR/report.png`."""

from __future__ import annotations

import argparse
import logging
import math
import os
import re
import shlex
import statistics
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

from trainer.errors import UserError, sentence_of
from trainer.metrics.names import PHASES, pass_at
from trainer.metrics.tracker import METRICS_FILE, PARENT_FILE, read_metrics
from trainer.process.failure_log import INFRASTRUCTURE, JOB, Incident, read_incidents
from trainer.process.log_setup import guard_output, show

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOG = logging.getLogger(__name__)

Rows = Sequence[dict[str, Any]]

_COLUMNS = 3
_FEW, _MANY = 25, 200
# The palette of Okabe and Ito, which colour-blind readers can tell apart.
_BLUE, _ORANGE, _GREEN, _RED, _PURPLE, _SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"
_YELLOW, _GREY = "#F0E442", "#B0B0B0"
_PHASE_COLOURS = dict(zip(PHASES, (_BLUE, _YELLOW, _ORANGE, _SKY, _GREEN, _PURPLE, _RED), strict=True))


def write_report(run_dir: str, out: str | None = None) -> str:
    """Draw the metrics of `{run_dir}/metrics.jsonl`, and return the path of the picture.

    A panel is left out if the run has not logged its metric. The report of a fork shows its parent, too, in lighter
    colours.

    Args:
        out: the PNG file; None: `{run_dir}/report.png`.

    Raises:
        UserError: there are no metrics.
    """
    source = os.path.join(run_dir, METRICS_FILE)
    if not os.path.exists(source):
        raise UserError(f"{source} does not exist; give the directory of a run")
    rows, parent = read_metrics(source), read_metrics(os.path.join(run_dir, PARENT_FILE))
    incidents = read_incidents(run_dir)
    panels = [panel for name, panel in _PANELS if any(row.get(name) is not None for row in rows)]
    panels += [panel for names, panel in ((_reward_terms(rows), _terms), (_of_episodes(rows), _episodes)) if names]
    if not panels:
        raise UserError(f"{source} has nothing to draw yet")

    import matplotlib
    from matplotlib.figure import Figure  # not pyplot, which keeps figures and looks for a screen

    grid = math.ceil(len(panels) / _COLUMNS)
    columns = min(_COLUMNS, len(panels))
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(5.2 * columns, 3.3 * grid + 0.4), layout="constrained")
        spec = figure.add_gridspec(grid, columns)
        for i, panel in enumerate(panels):
            row, column = divmod(i, columns)
            # The last panel fills the rest of its row.
            cell = spec[row, column:] if i == len(panels) - 1 else spec[row, column]
            axes = figure.add_subplot(cell)
            panel(axes, rows)
            _draw_incidents(axes, incidents)
            first = min([rows[0]["step"], *_draw_parent(axes, parent)])
            axes.set_xlabel("step")
            axes.set_xlim(first - 0.5, rows[-1]["step"] + 0.5)
            axes.xaxis.get_major_locator().set_params(integer=True)
        name = os.path.basename(os.path.abspath(run_dir)).encode(errors="backslashreplace").decode()
        origin = f", forked after step {parent[-1]['step']} (lighter: its parent)" if parent else ""
        marks = f", {len(incidents)} incident(s) (dotted; red: the job's own)" if incidents else ""
        figure.suptitle(f"{name} after step {rows[-1]['step']}{origin}{marks}", fontweight="bold")
        path = out or os.path.join(run_dir, "report.png")
        figure.savefig(path + ".tmp", format="png", dpi=130)
    os.replace(path + ".tmp", path)
    return path


def final_report(run_dir: str) -> None:
    """Draw the report of a finished run. Log where it is, or why it could not be drawn."""
    try:
        LOG.info("report: %s", write_report(run_dir))
    except (OSError, UserError) as error:
        LOG.warning("no report was drawn (%s); `trainer report %s` draws it", error, shlex.quote(run_dir))


_STYLE = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E6E6E6",
    "legend.frameon": False,
    "legend.fontsize": 9,
}


def _series(rows: Rows, name: str) -> tuple[list[int], list[float]]:
    """Return the steps that logged the metric, and its values. `null` becomes NaN, which is a gap in the line."""
    present = [row for row in rows if name in row]
    return [row["step"] for row in present], [_number(row[name]) for row in present]


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _line(axes: Axes, rows: Rows, name: str, label: str, colour: str) -> None:
    """Draw one metric: with markers if there are few points, as a running mean over a shadow if there are many."""
    steps, values = _series(rows, name)
    if len(steps) > _MANY:
        axes.plot(steps, values, color=colour, alpha=0.25, linewidth=0.6)
        values = _smooth(values, len(values) // 50)
    marker = "o" if len(steps) <= _FEW else ""
    axes.plot(steps, values, color=colour, label=label, marker=marker, markersize=4, linewidth=1.6, gid=name)


def _draw_parent(axes: Axes, parent: Rows) -> list[int]:
    """Draw the metrics of the fork's parent beside those that `_line` has drawn; return their steps."""
    drawn: list[int] = []
    for line in list(axes.lines):
        steps, values = _series(parent, line.get_gid() or "")
        known = [value for value in values if not math.isnan(value)]
        if known:
            bottom, top = axes.get_ylim()
            marker = "o" if len(steps) <= _FEW else ""
            axes.plot(steps, values, color=line.get_color(), alpha=0.4, marker=marker, markersize=4, linewidth=1.2)
            margin = 0.05 * (max(known) - min(known))
            axes.set_ylim(min(bottom, min(known) - margin), max(top, max(known) + margin))
            drawn += steps
    return drawn


def _draw_incidents(axes: Axes, incidents: Sequence[Incident]) -> None:
    """Draw a dotted line before the step of each incident."""
    colours = {JOB: _RED, INFRASTRUCTURE: "black"}
    for step, kind in sorted({(one.step, one.kind) for one in incidents}):
        axes.axvline(step - 0.5, color=colours.get(kind, _GREY), linestyle=":", linewidth=1.0, gid=f"incident {step}")


def _smooth(values: list[float], window: int) -> list[float]:
    """Return the mean of the `window` values around each value; fewer at the ends, and NaN is left out."""
    import numpy as np

    array, ones = np.array(values), np.ones(window)
    known = ~np.isnan(array)
    total = np.convolve(np.where(known, array, 0.0), ones, mode="same")
    count = np.convolve(known, ones, mode="same")
    return np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0.5).tolist()


def _reward(axes: Axes, rows: Rows) -> None:
    _line(axes, rows, "reward/mean", "training, mean", _BLUE)
    spread = [row for row in rows if None not in (row.get("reward/mean"), row.get("reward/std"))]
    low = [row["reward/mean"] - row["reward/std"] for row in spread]
    high = [row["reward/mean"] + row["reward/std"] for row in spread]
    steps = [row["step"] for row in spread]
    axes.fill_between(steps, low, high, color=_BLUE, alpha=0.15, linewidth=0, label="± standard deviation")
    _line(axes, rows, "val/reward/mean", "held out, greedy", _ORANGE)
    axes.set(title="Reward", ylabel="reward")
    axes.legend()


def _accuracy(axes: Axes, rows: Rows) -> None:
    _line(axes, rows, "val/accuracy", "greedy", _ORANGE)
    passes = sorted({name for row in rows for name in row if name.startswith(pass_at(""))})  # a resume may change k
    for name, colour in zip(passes, cycle((_PURPLE, _GREEN, _SKY, _RED))):  # noqa: B905, the colours do not end
        _line(axes, rows, name, name.removeprefix("val/"), colour)
    values = _series(rows, "val/accuracy")[1]
    best = max((value for value in values if not math.isnan(value)), default=math.nan)
    title = f"Held-out accuracy: first {values[0]:.3f}, best {best:.3f}, last {values[-1]:.3f}"
    axes.set(title=title, ylabel="share of successes")
    if len(axes.lines) > 1:
        axes.legend()


def _length(axes: Axes, rows: Rows) -> None:
    _line(axes, rows, "response_length/max", "longest", _SKY)
    _line(axes, rows, "response_length/mean", "mean", _BLUE)
    axes.set(title="Response length", ylabel="tokens")
    axes.set_ylim(bottom=0)
    axes.legend()


def _single(name: str, title: str, unit: str, colour: str) -> tuple[str, Callable[[Axes, Rows], None]]:
    """Return an entry of `_PANELS` that draws one metric."""

    def panel(axes: Axes, rows: Rows) -> None:
        _line(axes, rows, name, "", colour)
        axes.set(title=title, ylabel=unit)

    return name, panel


def _time(axes: Axes, rows: Rows) -> None:
    """Stack the seconds of the phases, with the rest of `time/step` on top."""
    timed = [row for row in rows if row.get("time/step") is not None]
    edges = [timed[0]["step"] - 0.5, *(row["step"] + 0.5 for row in timed)]
    base = [0.0] * len(timed)
    for phase in PHASES:
        seconds = [_number(row.get(f"time/{phase}", 0.0)) for row in timed]
        if any(seconds):
            top = [b + s for b, s in zip(base, seconds, strict=True)]
            label, colour = phase.replace("_", " "), _PHASE_COLOURS[phase]
            axes.stairs(top, edges, baseline=base, fill=True, color=colour, label=label)
            base = top
    top = [max(b, row["time/step"]) for b, row in zip(base, timed, strict=True)]
    axes.stairs(top, edges, baseline=base, fill=True, color=_GREY, label="rest")
    axes.set(title="Time per step", ylabel="seconds")
    # Leave room for the legend. If the first step is much slower than the others, there is room anyway.
    axes.set_ylim(0, max(1.05 * max(top), 1.6 * statistics.median(top)))
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="upper right", ncols=3)


def _means(rows: Rows, prefix: str) -> list[str]:
    """Return the metrics `{prefix}/NAME/mean` that were logged, by name."""
    names = {name for row in rows for name, value in row.items() if value is not None}
    return sorted(name for name in names if re.fullmatch(rf"{prefix}/.+/mean", name))


def _reward_terms(rows: Rows) -> list[str]:
    """Return the terms of the reward; none if there is one alone, which is the whole reward."""
    names = _means(rows, "reward")

    def is_whole(row: dict[str, Any]) -> bool:
        term, whole = row.get(names[0]), row.get("reward/mean")
        return None in (term, whole) or math.isclose(term, whole, rel_tol=1e-6)

    return [] if len(names) == 1 and all(map(is_whole, rows)) else names


def _of_episodes(rows: Rows) -> list[str]:
    """Return what environments count in an episode. Tokens are on another scale."""
    return [name for name in _means(rows, "episode") if name != "episode/tokens/mean"]


def _terms(axes: Axes, rows: Rows) -> None:
    _several(axes, rows, _reward_terms(rows), "reward/")
    axes.set(title="Terms of the reward", ylabel="reward")


def _episodes(axes: Axes, rows: Rows) -> None:
    _several(axes, rows, _of_episodes(rows), "episode/")
    axes.set(title="Episodes", ylabel="mean of an episode")


def _several(axes: Axes, rows: Rows, names: Sequence[str], prefix: str) -> None:
    """Draw the first metrics of a family, as many as colours can tell apart."""
    colours = (_BLUE, _ORANGE, _GREEN, _RED, _PURPLE, _SKY, _YELLOW, _GREY)
    for name, colour in zip(names, colours, strict=False):
        label = name.removeprefix(prefix).removesuffix("/mean")
        _line(axes, rows, name, label if label[0] != "_" else f" {label}", colour)  # "_…" would not be in the legend
    hidden = len(names) - len(colours)
    axes.legend(title=f"and {hidden} more, not drawn" if hidden > 0 else None)


def _supervised(axes: Axes, rows: Rows) -> None:
    _line(axes, rows, "sft/loss", "training", _BLUE)
    if any(row.get("val/loss") is not None for row in rows):
        _line(axes, rows, "val/loss", "held out", _ORANGE)
        axes.legend()
    axes.set(title="Loss (supervised)", ylabel="nats a token")


# The metric that a panel needs, and the panel.
_PANELS: tuple[tuple[str, Callable[[Axes, Rows], None]], ...] = (
    ("reward/mean", _reward),
    ("val/accuracy", _accuracy),
    ("response_length/mean", _length),
    ("sft/loss", _supervised),
    _single("policy/kl", "KL", "nats a token", _RED),
    _single("policy/entropy", "Entropy", "nats a token", _GREEN),
    _single("critic/explained_variance", "Critic: explained variance", "1", _PURPLE),
    ("time/step", _time),
)


def main() -> int:
    """Draw the report of the run on the command line; returns the exit status."""
    guard_output()
    parser = argparse.ArgumentParser(prog="trainer report", description="Draw RUN_DIR/report.png.")
    parser.add_argument("run_dir", metavar="RUN_DIR", help="directory with metrics.jsonl")
    parser.add_argument("--out", help="another file for the picture, for example of a run that you may only read")
    args = parser.parse_args()
    try:
        show(write_report(args.run_dir, args.out))
    except (UserError, OSError) as error:
        show(f"error: {sentence_of(error)}", error=True)
        return 2
    return 0
