"""When a driver that does not move counts as hanging, and what ends one that can run no Python."""

from __future__ import annotations

import signal
import subprocess
import sys

from trainer.cluster.watchdog import StallDetector

HANG_S, CALL_S = 60.0, 1000.0


def pause(stillness: StallDetector, seconds: int, step: int, moves: int, is_waiting: bool = False) -> float | None:
    """Look every second at a driver that has passed its last safe point in `step`."""
    looks = [stillness.look(1.0, step, moves, is_waiting) for _ in range(seconds + 1)]
    return next((still_s for still_s in looks if still_s is not None), None)


def known() -> StallDetector:
    """After three steps of which the longest pause took two seconds."""
    stillness = StallDetector(HANG_S, CALL_S)
    for step in (5, 6, 7):
        assert pause(stillness, 2, step, moves=step) is None
    return stillness


def test_a_driver_that_was_quick_before_hangs_after_the_short_limit():
    stillness = known()
    assert pause(stillness, 60, step=8, moves=8) is None
    assert stillness.look(1.0, 8, 8, False) == 61


def test_a_driver_that_is_slow_in_each_step_does_not_hang():
    stillness = known()
    assert pause(stillness, 20, step=8, moves=8) is None
    assert pause(stillness, 199, step=9, moves=9) is None
    assert pause(stillness, 2000, step=10, moves=10) == CALL_S + 1, "not even ten times as long"


def test_in_the_first_steps_and_while_it_waits_for_storage_a_driver_has_the_long_limit():
    assert pause(StallDetector(HANG_S, CALL_S), 2000, step=1, moves=1) == CALL_S + 1
    stillness = known()
    assert pause(stillness, 999, step=8, moves=8, is_waiting=True) is None
    assert pause(stillness, 2000, step=9, moves=9) == HANG_S + 1, "the wait is not a measure"


def test_a_pause_in_which_the_driver_has_waited_has_the_long_limit_to_its_end():
    """It may still work on what the storage has returned."""
    stillness = known()
    assert pause(stillness, 30, step=8, moves=8, is_waiting=True) is None
    assert pause(stillness, 300, step=8, moves=8) is None
    assert pause(stillness, 2000, step=9, moves=9) == HANG_S + 1, "the next pause has its own limit"


def test_a_driver_is_known_after_three_steps_since_its_start():
    stillness = StallDetector(HANG_S, CALL_S)
    for step in (5, 6, 7):
        assert pause(stillness, 100, step, moves=step) is None, "the first steps may compile"
    stillness = StallDetector(HANG_S, CALL_S)
    for step in (5, 6, 7):
        pause(stillness, 2, step, moves=step)
    assert pause(stillness, 100, step=8, moves=8) == HANG_S + 1


HELD = """
import sys, time
from trainer.cluster.watchdog import DriverWatch
from trainer.config import TrainerConfig
from trainer.process.failure_log import INCIDENTS
from trainer.process.signals import SIGNALS

SIGNALS.listen()
config = TrainerConfig(run_dir=sys.argv[1], hang_timeout_s=1.0, rpc_timeout_s=1.0)
log = open(f"{sys.argv[1]}/log.txt", "w")
with DriverWatch(config, None):
    time.sleep(2)  # nothing is watched before the steps
    INCIDENTS.step = 3
    with SIGNALS.between_steps():
        for _ in range(20):
            time.sleep(0.1)
            SIGNALS.check()
        sum(range(10**15))  # holds the interpreter's lock for days
"""


def test_a_driver_that_can_run_no_python_is_killed_and_its_stack_written(tmp_path):
    done = subprocess.run([sys.executable, "-c", HELD, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    words = "the driver has run no Python for 1 s in step 3, in a long call of a C library (trainer.rpc_timeout_s)"
    assert done.stderr.startswith(words) and done.stderr.count("\n") == 1
    assert (tmp_path / "log.txt").read_text().endswith(f" {done.stderr}")
    (stack,) = tmp_path.glob("stacks/*/driver.txt")
    assert stack.read_text().startswith(words) and "<module>" in stack.read_text()
