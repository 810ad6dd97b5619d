"""The file of the timeline, through kills and restarts."""

from __future__ import annotations

import json
import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.timelines import assert_nested, read_spans, spans_of
from trainer.config import LoggerConfig
from trainer.errors import UserError
from trainer.metrics.trace_file import TRACE_FILE, Timeline
from trainer.process.tracing import DRIVER, MAIN, OVERLAPPING, TRACER, Span


def span(name: str, start: float = 1.0, end: float = 2.0, process: str = "", row: str = MAIN, **details) -> Span:
    return Span(process, row, name, start, end, details)


def names(run_dir) -> list[str]:
    return [span.name for span in spans_of(run_dir)]


@pytest.fixture
def off():
    """Tracing is off again after the test."""
    yield
    TRACER.is_on = False
    TRACER.take()


def test_the_file_is_an_open_array_after_every_write_and_every_start(tmp_path):
    for start in range(3):
        file = Timeline(str(tmp_path), LoggerConfig())
        for number in range(2):
            file.write([span(f"{start} {number}", process="rank 1", step=number)])
            events = json.loads((tmp_path / TRACE_FILE).read_bytes().rstrip(b",\n") + b"]")
    assert names(tmp_path) == [f"{start} {number}" for start in range(3) for number in range(2)]
    assert sum(event["ph"] == "i" for event in events) == 3, "each start is marked"
    found = spans_of(tmp_path)
    assert {one.process for one in found} == {"rank 1"} and found[1].details == {"step": 1}
    assert found[0].end - found[0].start == pytest.approx(1.0)


@given(data=st.data())
def test_a_write_that_a_kill_has_cut_anywhere_costs_its_own_spans_alone(data, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("run")
    Timeline(str(run_dir), LoggerConfig()).write([span("kept", process="rank 0"), span('a "quoted\n]\n{ name')])
    before = (run_dir / TRACE_FILE).read_bytes()
    Timeline(str(run_dir), LoggerConfig()).write([span("torn"), span("torn", process="engine 0")])
    after = (run_dir / TRACE_FILE).read_bytes()
    cut = data.draw(st.integers(len(before), len(after)))
    (run_dir / TRACE_FILE).write_bytes(after[:cut])
    assert "kept" in [one.name for one in read_spans(str(run_dir))], "a viewer sees the spans before the repair, too"
    Timeline(str(run_dir), LoggerConfig()).write([span("next")])
    found = names(run_dir)
    assert found[:2] == ["kept", 'a "quoted\n]\n{ name'] and found[-1] == "next"
    assert found[2:-1] in ([], ["torn"], ["torn", "torn"])


def test_a_file_that_somebody_deletes_begins_again(tmp_path):
    file = Timeline(str(tmp_path), LoggerConfig())
    for _ in range(2):
        file.write([span("a", process="rank 0")])
        assert [(one.process, one.row) for one in spans_of(tmp_path)] == [("rank 0", MAIN)]
        (tmp_path / TRACE_FILE).unlink()


def test_a_file_that_has_only_begun_is_continued(tmp_path):
    for content in (b"", b"[\n", b"[", b"\0" * 5000):
        (tmp_path / TRACE_FILE).write_bytes(content)
        Timeline(str(tmp_path), LoggerConfig()).write([span("a")])
        assert names(tmp_path) == ["a"]


def test_the_size_is_bounded(tmp_path):
    file = Timeline(str(tmp_path), LoggerConfig(), most_bytes=4000)
    with pytest.raises(OSError, match="File too large"):
        for number in range(200):
            file.write([span(f"span {number}", process=f"rank {number % 2}")])
    assert os.path.getsize(tmp_path / TRACE_FILE) <= 5000
    found = spans_of(tmp_path)
    assert [one.name for one in found] == [f"span {number}" for number in range(len(found))]
    assert {one.process for one in found} == {"rank 0", "rank 1"} and len(found) > 20


@given(times=st.lists(st.tuples(st.floats(0, 100), st.floats(0, 10)), min_size=1, max_size=30))
def test_spans_that_overlap_get_rows_in_which_they_do_not(tmp_path_factory, times):
    run_dir = tmp_path_factory.mktemp("run")
    spans = sorted((span("call", a, a + b, "environment 0", OVERLAPPING) for a, b in times), key=lambda one: one.end)
    Timeline(str(run_dir), LoggerConfig()).write(spans)
    found = spans_of(run_dir)
    assert len(found) == len(spans) and {one.row.partition(" ")[0] for one in found} == {"calls"}
    for row in {one.row for one in found}:
        ends = sorted((one.start, one.end) for one in found if one.row == row)
        assert all(end <= start + 2e-6 for (_, end), (start, _) in zip(ends, ends[1:], strict=False))


def test_a_timeline_records_what_happens_while_it_is_open(tmp_path, off):
    with TRACER.span("before"):
        pass
    for name in ("traced", "untraced"):
        (tmp_path / name).mkdir()
    timeline = Timeline(str(tmp_path / "traced"), LoggerConfig(trace=True)).open()
    with TRACER.span("first"), TRACER.span("second"):
        pass
    timeline.close()
    untraced = Timeline(str(tmp_path / "untraced"), LoggerConfig()).open()
    with TRACER.span("after"):
        pass
    untraced.close()
    assert names(tmp_path / "traced") == ["second", "first"]
    assert os.listdir(tmp_path / "untraced") == [] and not TRACER.is_on
    assert_nested(spans_of(tmp_path / "traced"))
    assert {one.process for one in spans_of(tmp_path / "traced")} == {DRIVER}


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), UserError("another job has taken it")])
def test_a_file_that_cannot_be_written_ends_the_timeline_and_nothing_else(tmp_path, off, caplog, error):
    def fail() -> None:
        raise error

    timeline = Timeline(str(tmp_path), LoggerConfig(trace=True), fail).open()
    with TRACER.span("a"):
        pass
    timeline.flush()
    assert not TRACER.is_on
    with TRACER.span("b"):
        pass
    timeline.close()
    assert not list(tmp_path.iterdir()) and threading.active_count() >= 1
    assert ("the timeline ends here" in caplog.text) == isinstance(error, OSError)
