"""One step of the timeline: what each process did, and what it waited for."""

from __future__ import annotations

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from tests.support.metrics import make_tracker, step_metrics
from trainer.metrics.trace_file import TraceFile
from trainer.process.tracing import DRIVER, MAIN, OVERLAPPING, Span
from trainer.reports import timeline
from trainer.reports.report import write_report


def span(process: str, name: str, start: float, end: float, row: str = MAIN, **details) -> Span:
    return Span(process, row, name, start, end, details)


def step_spans(step: int, at: float) -> list[Span]:
    """A step of ten seconds: 4 s of rollouts, 5 s of updates, then the engine takes weights."""
    driver = [("rollout", 0, 4), ("update", 4, 9), ("sync", 9, 10)]
    spans = [
        *(span(DRIVER, name, at + a, at + b) for name, a, b in driver),
        span(DRIVER, "step", at, at + 10, step=step),
        span(DRIVER, "save 1", at + 3, at + 7, "saves"),
        span("engine 0", "generate", at + 0, at + 1.5),
        span("engine 0", "generate", at + 1.5, at + 3),
        span("engine 0", "sync weights", at + 9.5, at + 10),
        span("reward 0", "gsm8k", at + 1, at + 2, OVERLAPPING),
    ]
    for rank in range(2):
        spans += [
            span(f"rank {rank}", "mini-batch", at + 5, at + 8),
            span(f"rank {rank}", "policy update", at + 4.5, at + 9 - rank),
            span(f"rank {rank}", "policy write weights", at + 9, at + 9.5),
            span(f"rank {rank}", "finish save", at, at + 10, "background"),
        ]
    return spans


def write(run_dir, *spans: Span) -> None:
    TraceFile(str(run_dir), 1 << 30).write(list(spans))


def test_idle_times_are_named_by_what_the_driver_did(tmp_path):
    assert timeline.last_step(str(tmp_path)) is None
    write(tmp_path, *step_spans(6, 100), *step_spans(7, 120), span(DRIVER, "rollout", 130, 131))
    step = timeline.last_step(str(tmp_path))
    assert step.step == 7 and step.seconds == pytest.approx(10)
    assert list(step.lanes) == [DRIVER, "rank 0", "rank 1", "engine 0", "reward 0", "saves"]
    assert [name for name, _, _ in step.lanes[DRIVER]] == ["rollout", "update", "sync"]
    assert [name for name, _, _ in step.lanes["rank 0"]] == ["policy update", "policy write weights"]
    assert step.lanes["saves"][0][1:] == pytest.approx((3, 7))
    found = [(reason, round(start, 3), round(end, 3)) for reason, start, end in step.idle["rank 1"]]
    assert found == [("rollouts", 0, 4), ("the driver", 4, 4.5), ("the driver", 8, 9), ("the weight sync", 9.5, 10)]
    assert step.sentences == [
        "ranks idle 5.50 s of 10.00 s: waited for rollouts (4.00 s), for the driver (1.00 s), for the weight sync "
        "(0.50 s)",
        "engines idle 6.50 s of 10.00 s: waited for the update (5.00 s), for the driver (1.00 s), for the weight sync "
        "(0.50 s)",
    ]


def test_work_before_and_after_the_step_is_cut(tmp_path):
    step = span(DRIVER, "step", 10, 20, step=1)
    spans = [span("engine 0", "generate", 5, 12), span("engine 0", "generate", 18, 25), span("rank 0", "x", 1, 2), step]
    found = timeline.step_timeline(step, spans)
    assert found.lanes == {"engine 0": [("generate", 0, 2), ("generate", 8, 10)]}
    assert found.idle == {"engine 0": [("the driver", 2, 8)]}
    assert found.sentences == ["engines idle 6.00 s of 10.00 s: waited for the driver"]


def test_many_processes_share_a_picture_and_all_count(tmp_path):
    step = span(DRIVER, "step", 0, 10, step=1)
    spans = [step, span(DRIVER, "rollout", 0, 10)]
    spans += [span(f"policy rank {rank}", "policy update", 0, 10 if rank < 50 else 0.5) for rank in range(100)]
    found = timeline.step_timeline(step, spans)
    assert list(found.lanes) == [DRIVER, *(f"policy rank {rank}" for rank in range(8))]
    assert found.hidden == {"ranks": 92}
    assert found.sentences == ["ranks idle 4.75 s of 10.00 s: waited for rollouts"]
    axes = Figure().add_subplot()
    timeline.draw(axes, found, 30)
    assert axes.get_xlabel().splitlines() == [
        "seconds",
        "ranks idle 4.75 s of 10.00 s:",
        "waited for rollouts",
        "92 more ranks",
    ]
    assert [label.get_text() for label in axes.get_yticklabels()] == list(found.lanes)
    assert {text.get_text() for text in axes.get_legend().texts} == {"rollout", "policy update"}


def test_what_idle_processes_waited_for_fits_into_the_picture(tmp_path, monkeypatch):
    figures = []
    tracker = make_tracker(tmp_path)
    for number in (1, 2):
        tracker.log(number, step_metrics(number))
    tracker.close()
    write(tmp_path, *step_spans(2, 50))
    draw = timeline.draw
    monkeypatch.setattr(timeline, "draw", lambda axes, *rest: (figures.append(axes), draw(axes, *rest)))
    write_report(str(tmp_path))
    (axes,) = figures
    figure, text = axes.figure, axes.xaxis.label
    assert "engines idle 6.50 s of 10.00 s: waited for the update" in text.get_text()
    FigureCanvasAgg(figure).draw()
    drawn = text.get_window_extent()
    assert figure.bbox.x0 < drawn.x0 and drawn.x1 < figure.bbox.x1 and drawn.y0 > figure.bbox.y0
    assert drawn.x1 < axes.get_legend().get_window_extent().x0
    colours = {name: handle.get_facecolor() for handle, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    assert len({tuple(colour.ravel()) for colour in colours.values()}) == len(colours), "each name has its own colour"


def test_the_report_has_a_picture_of_the_last_step(tmp_path):
    tracker = make_tracker(tmp_path)
    for number in (1, 2):
        tracker.log(number, step_metrics(number))
    tracker.close()
    sizes = []
    for spans in ([], step_spans(2, 50)):
        if spans:
            write(tmp_path, *spans)
        with open(write_report(str(tmp_path)), "rb") as file:
            sizes.append(int.from_bytes(file.read(24)[20:24], "big"))
    assert sizes[1] > sizes[0] + 200
