"""Spans of processes, also of other machines."""

from __future__ import annotations

import threading
from collections import deque

import pytest

from trainer.process import tracing
from trainer.process.tracing import MAIN, WANTED, Answer, Span, Tracer, answer_call, boot_time, call_name


@pytest.fixture
def tracer(monkeypatch) -> Tracer:
    """The tracer of this process, switched on."""
    tracer = Tracer()
    tracer.is_on = True
    monkeypatch.setattr(tracing, "TRACER", tracer)
    monkeypatch.setattr(tracing, "_THREAD", threading.local())
    return tracer


def test_nothing_is_recorded_while_tracing_is_off():
    tracer = Tracer()
    assert tracer.span("a") is tracer.span("b"), "no object is made"
    with tracer.span("a"):
        tracer.add("b", 0.0, 1.0)
    assert tracer.take() == []


def test_a_span_is_recorded_at_its_end_even_if_the_block_raises():
    tracer = Tracer()
    tracer.is_on = True
    with pytest.raises(ZeroDivisionError), tracer.span("outer", rows=3), tracer.span("inner", "saves"):
        1 / 0  # noqa: B018
    inner, outer = tracer.take()
    assert (inner.name, inner.row, outer.name, outer.row) == ("inner", "saves", "outer", MAIN)
    assert outer.start <= inner.start <= inner.end <= outer.end and outer.details == {"rows": 3}
    assert tracer.take() == []
    thread = threading.Thread(target=lambda: tracer.add("elsewhere", 0.0, 1.0))
    thread.start()
    thread.join()
    assert tracer.take()[0].row == "threads*", "it is not in the row of the main thread"


def test_a_call_answers_with_its_spans_if_it_is_asked_for_them(tracer):
    def method(number: int, word: str = "") -> str:
        with tracer.span("inside"):
            return f"{number} {word}"

    assert answer_call(method, MAIN, (1,), {"word": "a"}, "method") == "1 a"
    assert tracer.take() == []
    answer = answer_call(method, "background", (1,), {"word": "a", WANTED: True}, "begin_save")
    assert isinstance(answer, Answer) and answer.result == "1 a"
    assert [(span.name, span.row) for span in answer.spans] == [("inside", "background"), ("begin save", "background")]
    driver = Tracer()
    assert driver.receive("rank 0", answer) == "1 a"
    assert [span.process for span in driver.take()] == ["rank 0"] * 2
    assert driver.receive("rank 0", "without spans") == "without spans"


def test_two_threads_may_take_the_spans_at_the_same_time(tracer):
    class Shared(deque):
        """Of which another thread takes the last span just before this one does."""

        def popleft(self) -> Span:
            if len(self) == 1:
                self.clear()
            return super().popleft()

    tracer._spans = Shared()
    with tracer.span("first"):
        pass
    answer = answer_call(lambda: "done", MAIN, (), {WANTED: True}, "update")
    assert answer.result == "done" and [span.name for span in answer.spans] == ["first"]


def test_calls_have_names_for_people():
    assert call_name("call", ("policy", "update", [1])) == "policy update"
    assert call_name("call", ("policy", "write_weights")) == "policy write weights"
    assert call_name("step", ({},)) == "generate"
    assert call_name("sync_weights", ()) == "sync weights"


def test_spans_of_another_machine_get_the_times_of_the_driver():
    driver = Tracer()
    for shift, expected in ((100.0, 110.0), (1e-6, 10.0)):
        answer = Answer("result", [Span("", MAIN, "update", 10.0, 10.5, {})], boot_time() + shift)
        assert driver.receive("rank 3", answer) == "result"
        (span,) = driver.take()
        assert span.process == "rank 3" and span[3:5] == pytest.approx((expected, expected + 0.5), abs=0.01)
