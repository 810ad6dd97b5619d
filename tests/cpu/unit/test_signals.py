"""Signals and deadlines, in this process and in one that does nothing but listen."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time

import pytest

from trainer.run.stopping import StopRequest
from trainer.signals import EXIT_STATUS, HANDLED, SIGNALS, Stopped


def send(number: int) -> None:
    """The signal is handled before this returns."""
    signal.raise_signal(number)


def test_the_exit_status_asks_schedulers_to_retry():
    assert EXIT_STATUS == 75, "EX_TEMPFAIL: scripts of users look for this number"


@pytest.mark.parametrize("number", HANDLED)
def test_between_steps_the_first_signal_waits_and_the_second_does_not(number):
    before = signal.getsignal(number)
    stop = StopRequest(None)
    with SIGNALS.listening():
        with SIGNALS.between_steps():
            send(number)
            assert stop.reason == signal.Signals(number).name
            SIGNALS.check()
            with pytest.raises(KeyboardInterrupt):
                send(number)
        SIGNALS.check()
    assert signal.getsignal(number) == before
    assert stop.reason is None, "the next run in this process starts without it"


def test_a_signal_handled_by_the_steps_is_not_raised_after_them():
    with SIGNALS.listening():
        with SIGNALS.between_steps():
            send(signal.SIGTERM)
        with SIGNALS.held():
            pass
        SIGNALS.check()


def test_outside_of_the_steps_a_signal_stops_immediately():
    with SIGNALS.listening(), pytest.raises(Stopped, match="SIGTERM"):
        send(signal.SIGTERM)


def test_libraries_that_catch_exceptions_do_not_catch_a_stop():
    assert not issubclass(Stopped, Exception)


def test_a_held_signal_is_raised_after_the_outermost_block_and_once():
    with SIGNALS.listening():
        with pytest.raises(Stopped):
            with SIGNALS.held():
                with SIGNALS.held():
                    send(signal.SIGTERM)
                reached = True
        assert reached
        with SIGNALS.held():
            pass
        SIGNALS.check()


def test_other_threads_hold_nothing_and_raise_nothing():
    outcome = []

    def wait() -> None:
        with SIGNALS.held():
            SIGNALS.check()
        outcome.append("went on")

    with SIGNALS.listening():
        with pytest.raises(Stopped):
            with SIGNALS.held():
                send(signal.SIGTERM)
                thread = threading.Thread(target=wait)
                thread.start()
                thread.join()
        assert outcome == ["went on"]


def test_a_third_signal_ends_a_process_that_does_not_respond():
    code = (
        "import time, signal\n"
        "from trainer.signals import SIGNALS\n"
        "with SIGNALS.listening(), SIGNALS.held():\n"
        "    print('up', flush=True)\n"
        "    while True: time.sleep(0.01)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "up\n"
    for _ in range(2):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.5)  # signals of one kind that are pending at a time count once
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 130


@pytest.mark.parametrize("number", HANDLED)
def test_a_signal_after_the_end_of_the_run_does_not_change_its_status(number, tmp_path):
    """Exit handlers run when the job has told how it ended: that is the latest moment at which Python runs."""
    code = (
        "import atexit, os, sys, time\n"
        "from trainer.config.command_line import run_app\n"
        f"atexit.register(lambda: [os.kill(os.getpid(), {int(number)}), time.sleep(0.1)])\n"
        "def job(cfg): print('finished')\n"
        "run_app(job)\n"
    )
    arguments = [f"trainer.run_dir={tmp_path}/run", "trainer.device=cpu"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "finished\n", "")


@pytest.mark.parametrize("module", ["numpy.linalg", "numpy._core.getlimits", "torch.storage"])
def test_a_signal_during_an_import_is_not_lost(module, tmp_path):
    """Where torch imports NumPy, it takes an exception for a NumPy that is not there."""
    code = (
        "import os, signal, sys\n"
        "from trainer.config.command_line import run_app\n"
        "from trainer.main import prepare\n"
        "class Interrupt:\n"
        f"    name = {module!r}\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == self.name:\n"
        "            self.name = None\n"
        "            os.kill(os.getpid(), signal.SIGTERM)\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "def job(cfg): print('trained on', prepare(cfg))\n"
        "run_app(job)\n"
    )
    arguments = [f"trainer.run_dir={tmp_path}/run", "trainer.device=cpu"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (EXIT_STATUS, "")
    assert done.stdout.startswith("stopped by SIGTERM")
