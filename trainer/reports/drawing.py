"""Curves of metrics over the steps of a run, and the pictures that hold them."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rows = Sequence[dict[str, Any]]  # lines of a `metrics.jsonl`
Panel = Callable[["Axes", Rows], None]  # draws a part of a picture

# The palette of Okabe and Ito, which colour-blind readers can tell apart.
BLUE, ORANGE, GREEN, RED, PURPLE, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"
YELLOW, GREY = "#F0E442", "#B0B0B0"
MOST_POINTS = 4000  # steps of a curve. Of a longer run, every second, third, … line is drawn.
_FEW, _MANY = 25, 200
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
    "text.parse_math": False,  # a user's name may have two "$", and what is between them may be no formula
}


@contextmanager
def picture(path: str, width: float, height: float) -> Iterator[Figure]:
    """Yield a figure of so many inches, and write it to the PNG file `path` after the block, or nothing."""
    import matplotlib
    from matplotlib.figure import Figure  # not pyplot, which keeps figures and looks for a screen

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure
        figure.savefig(path + ".tmp", format="png", dpi=130)
    os.replace(path + ".tmp", path)


def label_steps(axes: Axes) -> None:
    axes.set_xlabel("step")
    axes.xaxis.get_major_locator().set_params(integer=True)


def number(value: float | None) -> float:
    """Return a logged value. `null` is NaN, which is a gap in a curve."""
    return math.nan if value is None else value


def series(rows: Rows, name: str) -> tuple[list[int], list[float]]:
    """Return the steps that logged a metric, and its values."""
    present = [row for row in rows if name in row]
    return [row["step"] for row in present], [number(row[name]) for row in present]


def curve(axes: Axes, rows: Rows, name: str, label: str, colour: str | None = None) -> None:
    """Draw one metric: with markers if there are few points, as a running mean over a shadow if there are many."""
    steps, values = series(rows, name)
    if len(steps) > _MANY:
        (shadow,) = axes.plot(steps, values, color=colour, alpha=0.25, linewidth=0.6)
        colour, values = shadow.get_color(), _smooth(values, len(values) // 50)
    marker = "o" if len(steps) <= _FEW else ""
    label = f" {label}" if label.startswith("_") else label  # matplotlib leaves "_…" out of the legend
    axes.plot(steps, values, color=colour, label=label, marker=marker, markersize=4, linewidth=1.6, gid=name)


def share_axis(axes: Axes) -> None:
    """Let the vertical axis of shares begin at 0 and end at 1 at most, so that little looks like little."""
    top = axes.dataLim.y1 if axes.dataLim.y1 > 0 else 1.0  # nothing, or only zeros
    axes.set_ylim(0, 1.02 if top > 0.85 else 1.2 * top)


def _smooth(values: list[float], window: int) -> list[float]:
    """Return the mean of the `window` values around each value; fewer at the ends, and NaN is left out."""
    import numpy as np

    array, ones = np.array(values), np.ones(window)
    is_number = ~np.isnan(array)
    total = np.convolve(np.where(is_number, array, 0.0), ones, mode="same")
    count = np.convolve(is_number, ones, mode="same")
    return np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0.5).tolist()
