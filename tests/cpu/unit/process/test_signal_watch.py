"""The process that kills a job which can no longer end itself: third signals, and heartbeats that stop."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from tests.support.jobs import wait_until
from trainer.process.signal_watch import HeartbeatTimer


@pytest.fixture
def driver() -> Iterator[subprocess.Popen]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def heartbeat(limit_s: float | None, text: str = "too quiet") -> bytes:
    return json.dumps([limit_s, text, []]).encode() + b"\n"


def test_without_a_heartbeat_nothing_is_expected(driver):
    timer = HeartbeatTimer(driver.pid)
    assert timer.interval_s is None and not timer.is_expired()
    timer.receive(heartbeat(0.01) + heartbeat(None))
    assert timer.interval_s is None and not timer.is_expired()


def test_a_heartbeat_that_arrives_in_pieces_counts_when_it_is_complete(driver):
    timer, data = HeartbeatTimer(driver.pid), heartbeat(8.0)
    timer.receive(data[:5])
    assert timer.limit_s is None
    timer.receive(data[5:] + data[:3])
    assert (timer.limit_s, timer.text, timer.interval_s) == (8.0, "too quiet", 1.0)


def test_a_process_that_could_have_sent_a_heartbeat_expires_and_the_next_one_renews_it(driver):
    timer = HeartbeatTimer(driver.pid)
    timer.receive(heartbeat(0.05))
    wait_until(timer.is_expired)
    timer.receive(heartbeat(60.0))
    assert not timer.is_expired()


def test_time_in_which_the_process_is_stopped_does_not_count(driver):
    driver.send_signal(signal.SIGSTOP)
    wait_until(lambda: psutil.Process(driver.pid).status() == psutil.STATUS_STOPPED)
    timer = HeartbeatTimer(driver.pid)
    timer.receive(heartbeat(0.05))
    for _ in range(20):
        time.sleep(0.01)
        assert not timer.is_expired()


LONG_CALL = "sum(range(10**15))"  # holds the interpreter's lock for days
FULL_PIPE = "\nwhile True: os.write(writing, bytes(1 << 20))"
BEGINNING = """
import os
from trainer.process import signals, time_limits
time_limits.SAME_REQUEST_S, time_limits.SIGNAL_GRACE_S = 0.05, 0.2
reading, writing = os.pipe()
signals.SIGNALS.listen()
"""


@pytest.mark.parametrize("ends", [f"signals.SIGNALS.ignore(){FULL_PIPE}", LONG_CALL])
def test_a_third_signal_ends_any_process(ends, tmp_path):
    """Python handles no signal during a C call, and a run that has ended ignores signals."""
    log = tmp_path / "log.txt"
    code = f"{BEGINNING}\nlog = open({str(log)!r}, 'w')\nprint('up', flush=True)\n{ends}"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "up\n"
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        assert process.poll() is None
        process.send_signal(number)
        time.sleep(1)  # or they count as one
    assert "third signal, which the process could not handle" in process.communicate(timeout=300)[1]
    assert log.read_text().endswith("continues the run\n"), "the log contains the reason"
    assert process.returncode == -signal.SIGKILL


WITH_HEARTBEAT = f"""{BEGINNING}
import sys, time
command = [sys.executable, "-c", "print('asked', file=open(2, 'w'))"]
signals.SIGNALS.send_heartbeat(float(sys.argv[1]), "too quiet", command)
print("up", flush=True)
"""


def start_with_heartbeat(code: str, limit_s: float) -> subprocess.Popen:
    """Start a process that runs `code` after its first heartbeat."""
    command = [sys.executable, "-c", f"{WITH_HEARTBEAT}\n{code}", str(limit_s)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "up\n"
    return process


def test_a_process_that_can_run_no_python_is_killed_when_its_heartbeats_stop():
    process = start_with_heartbeat(LONG_CALL, limit_s=0.5)
    assert process.communicate(timeout=300)[1] == "asked\ntoo quiet\n"
    assert process.returncode == -signal.SIGKILL


def test_a_process_that_sends_or_switches_off_heartbeats_is_not_killed():
    beats = "for _ in range(20): signals.SIGNALS.send_heartbeat(3.0, 'too quiet'); time.sleep(0.2)"
    quiet = "signals.SIGNALS.send_heartbeat(None); time.sleep(4)"
    process = start_with_heartbeat(f"{beats}\n{quiet}\nprint('done')", limit_s=3.0)
    assert process.communicate(timeout=300) == ("done\n", "")
    assert process.returncode == 0


def test_a_process_that_is_stopped_is_not_killed():
    process = start_with_heartbeat("time.sleep(0.5)\nsignals.SIGNALS.send_heartbeat(None)\nprint('done')", limit_s=2.0)
    process.send_signal(signal.SIGSTOP)
    time.sleep(4)
    process.send_signal(signal.SIGCONT)
    assert process.communicate(timeout=300) == ("done\n", "")


def test_signals_of_a_forked_process_are_not_counted_as_those_of_its_parent():
    code = (
        f"{BEGINNING}\nimport time\nchild = os.fork()\n"
        "if child == 0: signals.SIGNALS.ignore(); os.write(writing, b'.'); time.sleep(3600)\n"
        "os.read(reading, 1)\n"
        "for _ in range(4): os.kill(child, 15); time.sleep(0.3)\n"
        "os.kill(child, 9); print('here')"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300).stdout == "here\n"


def test_the_watching_process_ends_with_its_process():
    code = f"{BEGINNING}\nprint(signals.SIGNALS._watch, flush=True)\nos.kill(os.getpid(), 9)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    end = time.monotonic() + 60
    while psutil.pid_exists(int(done.stdout)) and psutil.Process(int(done.stdout)).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_the_watching_process_survives_signals_to_every_process_of_the_job():
    """As Slurm sends them. Python would write an error about each later signal of its process."""
    code = (
        f"{BEGINNING}\nimport signal, time\nfor number in signals.HANDLED: os.kill(signals.SIGNALS._watch, number)\n"
        "time.sleep(0.5)\nos.kill(os.getpid(), signal.SIGTERM)\nprint(signals.SIGNALS.first)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.stderr) == ("SIGTERM\n", "")


@pytest.mark.parametrize("is_lost", [False, True])
def test_the_watching_process_ends_before_the_final_message(is_lost):
    lose = "os.kill(watch, 9); os.waitpid(watch, 0)" if is_lost else ""
    code = (
        f"{BEGINNING}\nwatch = signals.SIGNALS._watch\n{lose}\nsignals.SIGNALS.end_watch()\n"
        "print(os.path.exists(f'/proc/{watch}'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.stderr) == ("False\n", "")
