"""When a driver counts as hanging, and how the watchdog ends it."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from trainer.process import watchdog
from trainer.process.signals import EXIT_STATUS, SIGNALS
from trainer.process.watchdog import StallDetector, Watchdog, ends_within

HANG_S, RPC_S = 60.0, 1000.0


def pause(detector: StallDetector, safe_points: int, is_waiting: bool = False) -> float | None:
    """Return after how many seconds without a safe point the driver hangs; None: not within 2000."""
    for _ in range(2001):
        if detector.update(1.0, safe_points, is_waiting):
            return detector.pause_s
    return None


def test_a_driver_hangs_after_the_limit_which_is_longer_while_it_waits():
    detector = StallDetector(HANG_S, RPC_S)
    assert pause(detector, safe_points=1) == HANG_S + 1
    for _ in range(30):
        assert not detector.update(1.0, 2, True)
    assert pause(detector, safe_points=2) == RPC_S + 1, "the driver may still process what the storage has returned"
    assert pause(detector, safe_points=3) == HANG_S + 1, "the next pause has its own limit"


def test_progress_names_what_the_job_does(monkeypatch):
    dog = Watchdog(HANG_S, RPC_S)
    monkeypatch.setattr(SIGNALS, "safe_points", SIGNALS.safe_points)
    for status in ("starting", "restarting", "ending"):
        monkeypatch.setattr(SIGNALS, "moment", status)
        assert dog.progress().status == status and dog.progress().limit_s is None
    SIGNALS.safe_points += 1
    assert dog.progress().age_s == 0
    monkeypatch.setattr(SIGNALS, "moment", "training")
    dog._detector.update(1.0, 8, False)
    dog._detector.update(HANG_S, 8, False)
    assert dog.progress() == ("training", HANG_S, HANG_S)
    dog._detector.update(1.0, 8, False)
    assert dog.progress() == ("stalled", HANG_S + 1, HANG_S)


def test_a_call_that_does_not_end_is_left_behind():
    assert ends_within(lambda: None, 60)
    assert not ends_within(threading.Event().wait, 0.01)
    with pytest.raises(ZeroDivisionError):
        ends_within(lambda: 1 / 0, 60)


HANGING = """
import sys, time
from trainer.process import watchdog
from trainer.process.failures import INCIDENTS
from trainer.process.signals import SIGNALS

watchdog._MARGIN_S = 1.0
SIGNALS.listen()
INCIDENTS.open(sys.argv[1])
with watchdog.Watchdog(1.0, 1.0):
    time.sleep(2)  # nothing is watched before the steps
    INCIDENTS.step = 3
    with SIGNALS.in_training_loop():
        for _ in range(20):
            time.sleep(0.1)
            SIGNALS.check()
        {call}
"""


@pytest.mark.parametrize("call, status", [("time.sleep(3600)", EXIT_STATUS), ("sum(range(10**15))", 1)])
def test_a_driver_that_hangs_ends_with_its_stacks(call, status, tmp_path):
    """The second call keeps the interpreter's lock for days."""
    code = HANGING.format(call=call)
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == status, done.stderr
    assert 'File "<string>", line 17 in <module>' in done.stderr, "the stack of the main thread"
    if status == EXIT_STATUS:
        assert done.stderr.startswith("the driver has made no progress for 1 s in step 3: the job ends")
        assert '"cause": "hanging driver"' in (tmp_path / "incidents.jsonl").read_text()
    assert watchdog._MARGIN_S == 30
