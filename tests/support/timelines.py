"""What must be true of every timeline (`logger.trace`)."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from trainer.files.documents import is_number, parse_object
from trainer.metrics.trace_file import TRACE_FILE
from trainer.process.tracing import DRIVER, MAIN, Span

MICROSECOND = 2e-6  # spans are rounded to it


def spans_of(run: Path) -> list[Span]:
    """The spans of a run, whose file is JSON but for the closing bracket."""
    events = json.loads((run / TRACE_FILE).read_bytes().rstrip(b",\n") + b"]")
    assert all(event["ph"] in "MXi" for event in events)
    return read_spans(str(run))


def read_spans(run_dir: str) -> list[Span]:
    """Return the spans of a run in file order, in seconds since 1970. Lines that cannot be read are left out."""
    path, lines = os.path.join(run_dir, TRACE_FILE), []
    if os.path.isfile(path):
        with open(path, "rb") as file:
            lines = file.readlines()
    names: dict[tuple[object, object], str] = {}
    spans = []
    for line in lines:
        try:
            event = parse_object(line.rstrip(b",\n"))
        except ValueError:
            continue
        process, row = (event.get("pid"), None), (event.get("pid"), event.get("tid"))
        match event:
            case {"name": "process_name", "args": {"name": str(name)}}:
                names[process] = name
            case {"name": "thread_name", "args": {"name": str(name)}}:
                names[row] = name
            case {"ph": "X", "name": str(name), "ts": ts, "dur": dur} if is_number(ts) and is_number(dur):
                details = event["args"] if isinstance(event.get("args"), dict) else {}
                start, end = float(ts) / 1e6, float(ts + dur) / 1e6  # type: ignore[arg-type]
                spans.append(Span(names.get(process, ""), names.get(row, ""), name, start, end, details))  # type: ignore
    return spans


def assert_nested(spans: Iterable[Span]) -> None:
    """Spans of a row follow one another or nest."""
    rows = defaultdict(list)
    for span in spans:
        assert span.process and span.row and span.end >= span.start, span
        rows[span.process, span.row].append(span)
    for found in rows.values():
        open_spans: list[Span] = []
        for span in sorted(found, key=lambda span: (span.start, -span.end)):
            while open_spans and open_spans[-1].end <= span.start + MICROSECOND:
                open_spans.pop()
            assert not open_spans or span.end <= open_spans[-1].end + MICROSECOND, (span, open_spans[-1])
            open_spans.append(span)


def assert_fits_metrics(spans: list[Span], rows: Iterable[Mapping[str, Any]]) -> None:
    """The phases of each step take as long as its metrics say, and no process is busier than the step is long."""
    steps = {span.details["step"]: span for span in spans if span[:3] == (DRIVER, MAIN, "step")}
    trained = [row for row in rows if row["step"] > 0]
    assert {row["step"] for row in trained} <= steps.keys()
    for row in trained:
        step = steps[row["step"]]
        inside = [span for span in spans if step.start <= span.start and span.end <= step.end]
        assert abs(step.end - step.start - row["time/step"]) < 1e-4
        for phase in ("rollout", "environment", "logprob", "update", "sync"):
            spent = sum(span.end - span.start for span in inside if span[:3] == (DRIVER, MAIN, phase))
            assert abs(spent - row.get(f"time/{phase}", 0.0)) < 1e-3, phase
        for process in {span.process for span in inside} - {DRIVER}:
            calls = [span for span in inside if (span.process, span.row) == (process, MAIN)]
            outermost = [
                span
                for span in calls
                if not any(o is not span and o.start <= span.start and span.end <= o.end for o in calls)
            ]
            assert sum(span.end - span.start for span in outermost) <= step.end - step.start + MICROSECOND
