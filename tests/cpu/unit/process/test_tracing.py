"""Spans of processes, and the clocks of other machines."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import time
from collections import deque
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.process import tracing
from trainer.process.tracing import MAIN, WANTED, Answer, ClockOffset, Span, Tracer, answer_call, call_name


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
    assert answer.received_at <= answer.spans[1].start <= answer.spans[1].end <= answer.answered_at
    driver = Tracer()
    assert driver.receive("rank 0", 0.0, answer) == "1 a"
    assert [span.process for span in driver.take()] == ["rank 0"] * 2 and driver.clock_error_s("rank 0") == 0
    assert driver.receive("rank 0", 0.0, "without spans") == "without spans"


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


@given(
    offset=st.floats(-1e6, 1e6),
    calls=st.lists(st.tuples(*[st.floats(0.0, 5.0)] * 4), min_size=1, max_size=20),
)
def test_the_offset_of_a_clock_is_found_within_the_error_that_is_told(offset, calls):
    """However long a call waits before it is sent, on its way, in the worker, and for the driver to look at it."""
    clock, now = ClockOffset(), 0.0
    for pause, there, work, back in calls:
        sent = now + pause
        received, answered = sent + there, sent + there + work
        now = answered + back
        clock.update(sent, received + offset, answered + offset, now)
    assert abs(clock.seconds - offset) <= clock.error_s + 1e-6
    quickest = min(there + back for _, there, _, back in (calls if now < 60 else calls[-1:]))
    assert clock.error_s <= quickest / 2 + 1e-6, "older calls than those of the last minute may be forgotten"


def test_a_clock_that_drifts_is_followed():
    clock = ClockOffset()
    for second in range(1000):
        offset = 5.0 + 50e-6 * second
        clock.update(second, second + 0.001 + offset, second + 0.002 + offset, second + 0.003)
        assert abs(clock.seconds - offset) < 120 * 50e-6 and clock.error_s <= 0.001 + 1e-9
    assert clock.seconds > 5.04
    clock.update(1000.0, 0.001, 0.002, 1000.003)  # somebody has set it
    for second in range(1001, 1200):
        clock.update(second, second - 1000 + 0.001, second - 1000 + 0.002, second + 0.003)
    assert abs(clock.seconds + 1000) < 0.01


WORKER = """
import pickle, sys, time
from trainer.process.tracing import WANTED, answer_call
for _ in sys.stdin.buffer:
    pickle.dump(answer_call(time.monotonic, "main", (), {WANTED: True}, "now"), sys.stdout.buffer)
    sys.stdout.buffer.flush()
"""


def test_a_process_whose_clock_is_an_hour_ahead_gets_the_times_of_the_driver():
    user = [] if os.geteuid() == 0 else ["--map-root-user"]
    ahead = ["unshare", *user, "--time", "--monotonic", "3600", "--fork", "--kill-child"]
    if subprocess.run([*ahead, "true"], capture_output=True).returncode:
        pytest.skip("this machine has no time namespaces")
    driver = Tracer()
    with subprocess.Popen([*ahead, sys.executable, "-c", WORKER], stdin=-1, stdout=-1) as worker:
        for _ in range(5):
            sent = time.monotonic()
            worker.stdin.write(b"go\n")
            worker.stdin.flush()
            now = driver.receive("rank 0", sent, pickle.load(worker.stdout))
            (span,) = driver.take()
            assert now > sent + 3000, "the clock is another one"
            assert sent <= span.start <= span.end <= time.monotonic()
        worker.stdin.close()
    assert 0 < driver.clock_error_s("rank 0") < 3


def test_spans_of_another_machine_get_the_times_of_the_driver(monkeypatch):
    driver, now = Tracer(), SimpleNamespace(monotonic=lambda: 10.4)
    monkeypatch.setattr(tracing, "time", now)
    answer = Answer("result", [Span("", MAIN, "update", 110.1, 110.3, {})], "another boot", 110.1, 110.3)
    assert driver.receive("rank 3", 10.0, answer) == "result"
    (span,) = driver.take()
    assert span.process == "rank 3" and span[3:5] == pytest.approx((10.1, 10.3))
    assert driver.clock_error_s("rank 3") == pytest.approx(0.1)
