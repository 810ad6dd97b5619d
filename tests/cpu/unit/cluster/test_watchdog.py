"""When a driver counts as hanging, and the end of a driver that can run no Python."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from trainer.cluster.watchdog import StallDetector, Watchdog
from trainer.config import TrainerConfig
from trainer.process.signals import EXIT_STATUS, SIGNALS

HANG_S, RPC_S = 60.0, 1000.0


def pause(detector: StallDetector, seconds: int, step: int, safe_points: int, is_waiting: bool = False) -> float | None:
    """Update the detector every second during a pause of the driver in `step`."""
    pauses = [detector.update(1.0, step, safe_points, is_waiting) for _ in range(seconds + 1)]
    return next((pause_s for pause_s in pauses if pause_s is not None), None)


def after_three_steps() -> StallDetector:
    """A detector after three steps whose longest pause took two seconds."""
    detector = StallDetector(HANG_S, RPC_S)
    for step in (5, 6, 7):
        assert pause(detector, 2, step, safe_points=step) is None
    return detector


def test_a_driver_with_short_pauses_hangs_after_the_short_limit():
    detector = after_three_steps()
    assert pause(detector, 60, step=8, safe_points=8) is None
    assert detector.update(1.0, 8, 8, False) == 61


def test_a_driver_with_long_pauses_in_each_step_does_not_hang():
    detector = after_three_steps()
    assert pause(detector, 20, step=8, safe_points=8) is None
    assert pause(detector, 199, step=9, safe_points=9) is None
    assert pause(detector, 2000, step=10, safe_points=10) == RPC_S + 1, "not even ten times as long"


def test_the_long_limit_counts_in_the_first_steps_and_during_waits_for_storage():
    assert pause(StallDetector(HANG_S, RPC_S), 2000, step=1, safe_points=1) == RPC_S + 1
    detector = after_three_steps()
    assert pause(detector, 999, step=8, safe_points=8, is_waiting=True) is None
    assert pause(detector, 2000, step=9, safe_points=9) == HANG_S + 1, "the wait does not count as a usual pause"


def test_a_pause_that_contains_a_wait_has_the_long_limit_to_its_end():
    """The driver may still process the data that the storage has returned."""
    detector = after_three_steps()
    assert pause(detector, 30, step=8, safe_points=8, is_waiting=True) is None
    assert pause(detector, 300, step=8, safe_points=8) is None
    assert pause(detector, 2000, step=9, safe_points=9) == HANG_S + 1, "the next pause has its own limit"


def test_progress_is_stalled_when_the_limit_of_the_driver_is_exceeded(monkeypatch):
    watchdog = Watchdog(TrainerConfig(hang_timeout_s=HANG_S, rpc_timeout_s=RPC_S), None)
    monkeypatch.setattr(SIGNALS, "_steps", "inside")
    for step in (5, 6, 7, 8):
        pause(watchdog._detector, 1, step, safe_points=step)
    assert watchdog.progress() == ("training", 1.0, HANG_S)
    for _ in range(59):
        watchdog._detector.update(1.0, 8, 8, False)
    assert watchdog.progress() == ("training", HANG_S, HANG_S)
    watchdog._detector.update(1.0, 8, 8, False)
    assert watchdog.progress() == ("stalled", HANG_S + 1, HANG_S)


@pytest.mark.parametrize(
    ("steps", "status"), [("before", "starting"), ("interrupted", "restarting"), ("after", "ending")]
)
def test_outside_of_the_steps_progress_has_an_age_and_no_limit(monkeypatch, steps, status):
    watchdog = Watchdog(TrainerConfig(), None)
    monkeypatch.setattr(SIGNALS, "_steps", steps)
    monkeypatch.setattr(SIGNALS, "safe_points", SIGNALS.safe_points)
    first = watchdog.progress()
    second = watchdog.progress()
    assert first.status == status and first.limit_s is None and second.age_s >= first.age_s
    SIGNALS.safe_points += 1
    assert watchdog.progress().age_s == 0


def test_the_usual_pause_is_known_three_steps_after_the_start():
    detector = StallDetector(HANG_S, RPC_S)
    for step in (5, 6, 7):
        assert pause(detector, 100, step, safe_points=step) is None, "the first steps may compile"
    detector = StallDetector(HANG_S, RPC_S)
    for step in (5, 6, 7):
        pause(detector, 2, step, safe_points=step)
    assert pause(detector, 100, step=8, safe_points=8) == HANG_S + 1


HELD = """
import sys, time
from trainer.cluster.watchdog import Watchdog
from trainer.config import TrainerConfig
from trainer.process.failure_log import INCIDENTS
from trainer.process.signals import SIGNALS

SIGNALS.listen()
config = TrainerConfig(run_dir=sys.argv[1], hang_timeout_s=1.0, rpc_timeout_s=1.0)
log = open(f"{sys.argv[1]}/log.txt", "w")
with Watchdog(config, None):
    time.sleep(2)  # nothing is watched before the steps
    INCIDENTS.step = 3
    with SIGNALS.in_training_loop():
        for _ in range(20):
            time.sleep(0.1)
            SIGNALS.check()
        sum(range(10**15))  # holds the interpreter's lock for days
"""


def test_a_driver_that_can_run_no_python_is_killed_and_its_stack_is_written(tmp_path):
    done = subprocess.run([sys.executable, "-c", HELD, str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stderr
    words = "the driver has run no Python for 1 s in step 3, in a long call of a C library (trainer.rpc_timeout_s)"
    assert done.stderr.startswith(words) and done.stderr.count("\n") == 1
    assert (tmp_path / "log.txt").read_text().endswith(f" {done.stderr}")
    (stack,) = tmp_path.glob("stacks/*/driver.txt")
    assert stack.read_text().startswith(words) and "<module>" in stack.read_text()


WAITING = """
import sys, time
from trainer.cluster.watchdog import Watchdog
from trainer.config import TrainerConfig
from trainer.process.failure_log import INCIDENTS
from trainer.process.signals import SIGNALS
from trainer.sources.ahead import BatchThread

SIGNALS.listen()
with Watchdog(TrainerConfig(run_dir=sys.argv[1], hang_timeout_s=1.0, rpc_timeout_s=1.0), None):
    INCIDENTS.step = 3
    with SIGNALS.in_training_loop():
        BatchThread(4, 3, "", lambda progress: time.sleep(3600), None).result()
"""


def test_a_driver_that_waits_for_rollouts_names_them_when_they_hang(tmp_path):
    done = subprocess.run([sys.executable, "-c", WAITING, str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == EXIT_STATUS, done.stderr
    words = "the driver has made no progress for 1 s in step 3, waiting for the rollouts of step 4, (trainer.rpc_timeou"
    assert words in done.stderr
