"""The process that kills a job which can no longer end itself after its third signal."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from tests.support.jobs import has_ended

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
def test_a_third_signal_ends_any_process(ends):
    """Python handles no signal during a C call, and a run that has ended ignores signals."""
    code = f"{BEGINNING}\nprint('up', flush=True)\n{ends}"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "up\n"
    for number in (signal.SIGTERM, signal.SIGINT):
        process.send_signal(number)
        time.sleep(0.3)  # or they count as one
    assert process.poll() is None
    while process.poll() is None:  # on a busy machine the watching process may read two at a time, which count as one
        process.send_signal(signal.SIGUSR1)
        time.sleep(0.3)
    assert "third signal, which the process could not handle" in process.communicate(timeout=300)[1]
    assert process.returncode == -signal.SIGKILL


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
    code = f"{BEGINNING}\nprint(signals.SIGNALS.watching_process, flush=True)\nos.kill(os.getpid(), 9)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    end = time.monotonic() + 60
    while not has_ended(int(done.stdout)):
        assert time.monotonic() < end
        time.sleep(0.01)


def test_the_watching_process_survives_signals_to_every_process_of_the_job():
    """As Slurm sends them. Python would write an error about each later signal of its process."""
    code = (
        f"{BEGINNING}\nimport signal, time\nwatch = signals.SIGNALS.watching_process\n"
        "for number in signals.HANDLED: os.kill(watch, number)\n"
        "time.sleep(0.5)\nos.kill(os.getpid(), signal.SIGTERM)\nprint(signals.SIGNALS.first)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.stderr) == ("SIGTERM\n", "")


@pytest.mark.parametrize("ends", ["os.kill(os.getpid(), 9)", "os._exit(1)", "signals.SIGNALS.end_watch()"])
def test_what_a_module_of_the_user_has_started_ends_with_its_process_however_it_ends(ends):
    code = (
        f"{BEGINNING}\nimport subprocess\nfrom trainer.process.startup import noting_processes\n"
        "with noting_processes(): server = subprocess.Popen(['sh', '-c', 'sleep 600 & echo $!; wait'], stdout=1)\n"
        f"os.write(1, b'%d\\n' % server.pid)\n{ends}"  # whole, beside the line of the other
    )
    job = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    started = [int(job.stdout.readline()) for _ in range(2)]
    job.wait(60)
    end = time.monotonic() + 60
    while not all(map(has_ended, started)):
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("is_lost", [False, True])
def test_the_watching_process_ends_before_the_final_message(is_lost):
    lose = "os.kill(watch, 9); os.waitpid(watch, 0)" if is_lost else ""
    code = (
        f"{BEGINNING}\nwatch = signals.SIGNALS.watching_process\n{lose}\nsignals.SIGNALS.end_watch()\n"
        "print(os.path.exists(f'/proc/{watch}'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.stderr) == ("False\n", "")
