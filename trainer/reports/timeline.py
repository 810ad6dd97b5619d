"""One step of a run's timeline: what each process did, and what idle ranks and engines waited for."""

from __future__ import annotations

import re
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, cycle
from typing import TYPE_CHECKING

from trainer.metrics.names import PHASES
from trainer.metrics.trace_file import read_spans
from trainer.process.tracing import DRIVER, MAIN, Span
from trainer.reports.drawing import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, SKY, YELLOW

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STEP = "step"
_NEWEST_BYTES = 16 << 20
_MOST_LANES = 8  # of one kind
_SMALLEST_SHARE = 0.01  # of a step, for an idle time that is named
_KINDS = {"rank": "ranks", "engine": "engines", "environment": "environments", "reward": "rewards"}
"""The kinds of processes in the picture below the driver, by the last word of their names before the number."""
_WAITS = {
    "rollout": "rollouts",
    "environment": "environments",
    "reward": "rewards",
    "logprob": "log-probs",
    "update": "the update",
    "sync": "the weight sync",
    "checkpoint_blocked": "the save",
    "journal": "the journal",
}
"""What a process waits for while it is idle in a phase of the driver."""
_OWN_PHASES = {"rank": ("logprob", "update"), "engine": ("rollout",)}
"""The phases in which a kind of processes works. If it is idle there, it waits for the driver."""
_THE_DRIVER = "the driver"
# The muted palette of Tol: no span has the colour of a phase, which are of Okabe and Ito.
_MUTED = ("#332288", "#44AA99", "#882255", "#999933", "#88CCEE", "#661100", "#DDCC77", "#AA4499", "#117733", "#888888")
_BACKGROUND = ("saves", "uploads", "journal")
"""Rows of the driver that get a lane of their own."""

Interval = tuple[float, float]


@dataclass(frozen=True)
class StepTimeline:
    """What the processes of a run did in one step. Times are seconds from its begin."""

    step: int
    seconds: float
    lanes: dict[str, list[tuple[str, float, float]]]
    """Name, start and end of the outermost spans of each process, by its name, from the top to the bottom."""
    idle: dict[str, list[tuple[str, float, float]]]
    """Of each rank and engine: what it waited for, and when."""
    hidden: Counter[str] = field(default_factory=Counter)
    """Numbers of further processes without a lane here, by kind. They count in `sentences`."""
    sentences: list[str] = field(default_factory=list)
    """How long ranks and engines were idle, and what they waited for."""


def last_step(run_dir: str) -> StepTimeline | None:
    """Return the last complete step in the timeline of a run; None: there is none."""
    spans = read_spans(run_dir, _NEWEST_BYTES)
    steps = [span for span in spans if span[:3] == (DRIVER, MAIN, STEP) and type(span.details.get(STEP)) is int]
    return step_timeline(steps[-1], spans) if steps else None


def step_timeline(step: Span, spans: Iterable[Span]) -> StepTimeline:
    """Return what the processes did in a step.

    Args:
        step: the span of the whole step.
        spans: of the run.
    """
    seconds = step.end - step.start
    found: defaultdict[str, list[tuple[str, float, float]]] = defaultdict(list)
    for span in spans:
        lane, start, end = _lane_of(span), max(0.0, span.start - step.start), min(seconds, span.end - step.start)
        if lane and start < end and span[:3] != step[:3]:
            found[lane].append((span.name, start, end))
    lanes = {lane: _outermost(found[lane]) for lane in sorted(found, key=_place)}
    phases = _outermost([bar for bar in found[DRIVER] if bar[0] in _WAITS])
    idle = {
        lane: _waits(bars, phases, seconds, _kind(lane)) for lane, bars in lanes.items() if _kind(lane) in _OWN_PHASES
    }
    shown, hidden = _first_lanes(lanes)
    return StepTimeline(
        step.details[STEP],
        seconds,
        shown,
        {lane: waits for lane, waits in idle.items() if lane in shown},
        hidden,
        list(_sentences(idle, seconds)),
    )


def lines_below(timeline: StepTimeline, letters: int) -> list[str]:
    """Return what stands below a step, in lines of at most that many letters: what its idle processes waited for."""
    more = [f"{count} more {kind}" for kind, count in timeline.hidden.items()]
    sentences = [*timeline.sentences, *([", ".join(more)] if more else [])]
    return [line for sentence in sentences for line in textwrap.wrap(sentence, letters)]


def draw(axes: Axes, timeline: StepTimeline, letters: int) -> None:
    """Draw a step: a lane for each process, with what idle ranks and engines waited for.

    Args:
        letters: as many fit into a line below.
    """
    names = list(dict.fromkeys(name for bars in timeline.lanes.values() for name, _, _ in bars))
    free = cycle(_MUTED)
    colours = dict(zip(PHASES, (BLUE, YELLOW, ORANGE, SKY, GREEN, PURPLE, RED), strict=True))
    colours |= {name: next(free) for name in names if name not in colours}
    for number, (lane, bars) in enumerate(timeline.lanes.items()):
        for name in dict.fromkeys(name for name, _, _ in bars):
            pieces = [(start, end - start) for other, start, end in bars if other == name]
            axes.broken_barh(pieces, (number - 0.4, 0.8), color=colours[name], label=name)
        for reason, start, end in timeline.idle.get(lane, ()):
            axes.broken_barh([(start, end - start)], (number - 0.4, 0.8), color="#F0F0F0", hatch="///", edgecolor=GREY)
            if end - start > 0.12 * timeline.seconds:
                text = f"idle {end - start:.2f} s: {reason}"
                axes.text((start + end) / 2, number, text, ha="center", va="center", fontsize=8)
    axes.set_yticks(range(len(timeline.lanes)), list(timeline.lanes))
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlim(0, timeline.seconds)
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))  # each name once
    axes.legend(handles.values(), handles.keys(), loc="upper left", bbox_to_anchor=(1.0, 1.0))
    axes.set_xlabel("\n".join(["seconds", *lines_below(timeline, letters)]))
    axes.set_title(f"Step {timeline.step}: what each process did")


def _lane_of(span: Span) -> str:
    """Return the lane of a span in the picture; empty: it has none."""
    if span.process == DRIVER:
        return DRIVER if span.row == MAIN else span.row if span.row in _BACKGROUND else ""
    if _kind(span.process) in _OWN_PHASES:
        return span.process if span.row == MAIN else ""
    return span.process if _kind(span.process) in _KINDS else ""


def _kind(process: str) -> str:
    """Return the kind of a process: `rank` for `critic rank 3`."""
    match = re.fullmatch(r"(?:.* )?(\w+) \d+", process)
    return match[1] if match else ""


def _place(lane: str) -> tuple[int, str, int]:
    """Return the sort key of a lane."""
    order = [DRIVER, *_KINDS, *_BACKGROUND]
    name, _, number = lane.rpartition(" ")
    kind = _kind(lane) or lane
    return order.index(kind), name, int(number) if number.isdigit() else 0


def _outermost(bars: list[tuple[str, float, float]]) -> list[tuple[str, float, float]]:
    """Return the bars that lie in no other, in the order of their starts."""
    chosen: list[tuple[str, float, float]] = []
    for bar in sorted(bars, key=lambda bar: (bar[1], -bar[2])):
        if not chosen or bar[2] > chosen[-1][2]:
            chosen.append(bar)
    return chosen


def _gaps(bars: Iterable[tuple[str, float, float]], seconds: float) -> list[Interval]:
    """Return when no bar is there."""
    gaps, end = [], 0.0
    for _, start, until in sorted(bars, key=lambda bar: bar[1]):
        if start > end:
            gaps.append((end, start))
        end = max(end, until)
    return [*gaps, (end, seconds)] if end < seconds else gaps


def _waits(
    bars: Sequence[tuple[str, float, float]], phases: Sequence[tuple[str, float, float]], seconds: float, kind: str
) -> list[tuple[str, float, float]]:
    """Return what a process waited for, and when: the phase that the driver was in."""
    gaps = _gaps(bars, seconds)
    own = _OWN_PHASES[kind]
    named = [(_THE_DRIVER if name in own else _WAITS[name], start, end) for name, start, end in phases]
    between = [(_THE_DRIVER, start, end) for start, end in _gaps(phases, seconds)]
    waits = [
        (reason, max(start, begin), min(end, until))
        for start, end in gaps
        for reason, begin, until in chain(named, between)
        if max(start, begin) < min(end, until)
    ]
    return sorted(waits, key=lambda wait: wait[1])


def _sentences(idle: dict[str, list[tuple[str, float, float]]], seconds: float) -> Iterable[str]:
    """Yield a sentence for each kind of processes that was idle: on average over its processes."""
    for kind in dict.fromkeys(map(_kind, idle)):
        lanes = [waits for lane, waits in idle.items() if _kind(lane) == kind]
        totals: Counter[str] = Counter()
        for reason, start, end in chain.from_iterable(lanes):
            totals[reason] += (end - start) / len(lanes)
        named = [(reason, spent) for reason, spent in totals.most_common() if spent >= _SMALLEST_SHARE * seconds]
        if named:
            (first, spent), *others = named
            reasons = f"waited for {first} ({spent:.2f} s)" + "".join(f", for {why} ({s:.2f} s)" for why, s in others)
            if not others:
                reasons = f"waited for {first}"
            total = sum(totals.values())
            yield f"{_KINDS[kind]} idle {total:.2f} s of {seconds:.2f} s: {reasons}"


def _first_lanes(
    lanes: dict[str, list[tuple[str, float, float]]],
) -> tuple[dict[str, list[tuple[str, float, float]]], Counter[str]]:
    """Return the lanes to draw, and how many others there are, by kind."""
    shown, hidden, counts = {}, Counter[str](), Counter[str]()
    for lane, bars in lanes.items():
        kind = _KINDS.get(_kind(lane), lane)
        counts[kind] += 1
        if counts[kind] <= _MOST_LANES:
            shown[lane] = bars
        else:
            hidden[kind] += 1
    return shown, hidden
