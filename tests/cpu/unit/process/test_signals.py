"""Signals and deadlines, in this process and in one that does nothing but listen."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from trainer.errors import NotSavedError, WorkerError
from trainer.process import time_limits
from trainer.process.signals import EXIT_STATUS, HANDLED, SIGNALS, Stopped
from trainer.run.state import StopRequest

ROOT = str(Path(__file__).parents[4])
STREAMS = r"""
import os
streams = [os.readlink(f"/proc/self/fd/{{number}}") for number in range(3)]
with open("{}", "w") as file:
    print(*streams, sep="\n", file=file)
"""


@pytest.fixture(autouse=True)
def every_signal_counts(monkeypatch):
    """Signals count one by one, however close they are."""
    monkeypatch.setattr(time_limits, "SAME_REQUEST_S", 0.0)


def send(number: int) -> None:
    """The signal is recorded before this returns."""
    signal.raise_signal(number)


def test_the_exit_status_asks_schedulers_to_retry():
    assert EXIT_STATUS == 75, "EX_TEMPFAIL: scripts of users look for this number"


@pytest.mark.parametrize("closed", ["0<&- 1>&- 2>&-", "1>&-"])
def test_closed_streams_are_not_taken_for_the_pipe_of_signals(closed, tmp_path):
    """What is printed would count as signals, and the job would be killed at each start."""
    (tmp_path / "child.py").write_text(STREAMS.format("child"))
    (tmp_path / "job.py").write_text(
        "import subprocess, sys\nfrom trainer.process.signals import SIGNALS\nSIGNALS.listen()\n"
        + STREAMS.format("job")
        + "subprocess.run([sys.executable, 'child.py'], check=True)\n"
    )
    command = f"exec {sys.executable} job.py {closed}"
    subprocess.run(["sh", "-c", command], cwd=tmp_path, env={**os.environ, "PYTHONPATH": ROOT}, check=True, timeout=60)
    job, child = ((tmp_path / name).read_text().splitlines() for name in ("job", "child"))
    assert job == child and [job[int(stream[0])] for stream in closed.split()] == ["/dev/null"] * len(closed.split())


@pytest.mark.parametrize("number", HANDLED)
def test_in_the_training_loop_the_first_signal_is_deferred_and_the_second_is_not(number):
    before = signal.getsignal(number)
    stop = StopRequest(None)
    with SIGNALS.listening():
        with SIGNALS.in_training_loop():
            send(number)
            assert stop.reason == signal.Signals(number).name
            SIGNALS.check()
            send(number)
            with pytest.raises(KeyboardInterrupt, match="second signal"):
                SIGNALS.check()
        SIGNALS.check()
    assert signal.getsignal(number) == before
    assert stop.reason is None, "the next run in this process starts without it"


def test_signals_are_handled_without_the_watching_process(monkeypatch):
    monkeypatch.setattr(sys, "executable", "")
    open_before = len(os.listdir("/proc/self/fd"))
    with SIGNALS.listening(), SIGNALS.in_training_loop():
        send(signal.SIGTERM)
        assert SIGNALS.count == 1
    assert len(os.listdir("/proc/self/fd")) == open_before


def test_signals_that_arrive_together_count_as_one(monkeypatch):
    """As `timeout` sends them: to the process, then to its group."""
    monkeypatch.setattr(time_limits, "SAME_REQUEST_S", 60.0)
    with SIGNALS.listening(), SIGNALS.in_training_loop():
        for _ in range(3):
            send(signal.SIGTERM)
        SIGNALS.check()


def test_a_signal_handled_in_the_training_loop_is_not_raised_after_it():
    with SIGNALS.listening():
        with SIGNALS.in_training_loop():
            send(signal.SIGTERM)
        with SIGNALS.deferred():
            pass
        SIGNALS.check()


@pytest.mark.parametrize("number", HANDLED)
def test_outside_the_training_loop_a_signal_stops_at_the_next_safe_point(number):
    name = signal.Signals(number).name
    with SIGNALS.listening():
        send(number)
        with pytest.raises(Stopped, match=f"{name} before the first step"):
            SIGNALS.check()
        send(number)
        SIGNALS.check()  # the run is ending: another signal must not disturb its end
    with SIGNALS.listening():
        with SIGNALS.in_training_loop():
            pass
        send(number)
        with pytest.raises(Stopped, match=f"{name} after the last step"):
            SIGNALS.check()


def test_without_a_safe_point_a_signal_stops_after_a_while(monkeypatch):
    monkeypatch.setattr(time_limits, "SIGNAL_GRACE_S", 0.01)
    with SIGNALS.listening(), pytest.raises(Stopped):
        send(signal.SIGTERM)
        while True:
            time.sleep(3600)


def test_an_exception_that_replaced_a_stop_is_recognised(monkeypatch):
    """Ray, for example, turns whatever a handler raises into a SystemError."""
    with SIGNALS.listening():
        assert SIGNALS.stop_behind(SystemError()) is None
        send(signal.SIGTERM)
        assert SIGNALS.stop_behind(SystemError()) is None, "the error was there before the stop"
        with pytest.raises(Stopped) as stop:
            SIGNALS.check()
        assert SIGNALS.stop_behind(stop.value) is None
        assert SIGNALS.stop_behind(SystemError()) is stop.value


def test_the_death_of_a_rank_after_a_signal_counts_as_a_stop():
    """A signal to all processes of a job reaches ranks on other machines too."""
    with SIGNALS.listening(), SIGNALS.in_training_loop():
        assert SIGNALS.stop_behind(WorkerError("rank 1 died")) is None
        send(signal.SIGTERM)
        assert SIGNALS.stop_behind(NotSavedError("the disk is full")) is None
        assert "rank 1 died" in str(SIGNALS.stop_behind(WorkerError("rank 1 died")))


def test_threads_that_start_while_signals_are_blocked_get_none():
    masks = []
    with SIGNALS.listening():
        with SIGNALS.blocked():
            thread = threading.Thread(target=lambda: masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, ())))
            thread.start()
        thread.join()
        assert set(HANDLED) <= masks[0] and not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & set(HANDLED)


def test_libraries_that_catch_exceptions_do_not_catch_a_stop():
    assert not issubclass(Stopped, Exception)


def test_a_deferred_signal_is_raised_once_after_the_outermost_block():
    with SIGNALS.listening():
        with pytest.raises(Stopped):
            with SIGNALS.deferred():
                with SIGNALS.deferred():
                    send(signal.SIGTERM)
                reached = True
        assert reached
        with SIGNALS.deferred():
            pass
        SIGNALS.check()


def test_other_threads_neither_defer_nor_raise_signals():
    outcome = []

    def wait() -> None:
        with SIGNALS.deferred():
            SIGNALS.check()
        outcome.append("went on")

    with SIGNALS.listening():
        with pytest.raises(Stopped):
            with SIGNALS.deferred():
                send(signal.SIGTERM)
                thread = threading.Thread(target=wait)
                thread.start()
                thread.join()
        assert outcome == ["went on"]


def test_a_third_signal_ends_a_process_that_does_not_respond():
    code = (
        "import time\n"
        "from trainer.process import signals, time_limits\n"
        "time_limits.SAME_REQUEST_S = 0\n"
        "with signals.SIGNALS.listening(), signals.SIGNALS.deferred():\n"
        "    print('up', flush=True)\n"
        "    while signals.SIGNALS.count < 2: time.sleep(0.01)\n"
        "    print('two', flush=True)\n"
        "    while True: time.sleep(0.01)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGUSR1)
    assert process.stdout.readline() == "two\n"
    process.send_signal(signal.SIGTERM)
    assert "third signal" in process.communicate(timeout=300)[1]
    assert process.returncode == EXIT_STATUS


def test_a_signal_after_the_end_of_the_run_does_not_change_its_status(tmp_path):
    """Exit handlers run after the job has reported how it ended: the last moment at which Python runs."""
    code = (
        "import atexit, os, sys, time\n"
        "from trainer.config.command_line import run_app\n"
        "atexit.register(lambda: [os.kill(os.getpid(), 15), time.sleep(0.1)])\n"
        "def job(cfg): print('finished')\n"
        "run_app(job)\n"
    )
    arguments = [f"trainer.run_dir={tmp_path}/run", "trainer.device=cpu"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "finished\n", "")


def test_a_signal_during_an_import_is_not_lost(tmp_path):
    """Where torch imports NumPy, it takes an exception for a NumPy that is not there."""
    code = (
        "import os, signal, sys\n"
        "from trainer.config.command_line import run_app\n"
        "from trainer.main import prepare\n"
        "class Interrupt:\n"
        "    name = 'numpy.linalg'\n"
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


def test_a_signal_during_a_long_first_import_ends_with_75(tmp_path):
    """Imports take half a minute where packages lie on a cold network disk."""
    (tmp_path / "xxhash.py").write_text(
        "import sys, time\n"
        "print('importing', flush=True)\n"
        "time.sleep(5)\n"  # longer than a signal waits for a safe point
        "here = __file__.rpartition('/')[0]\n"
        "sys.path[:] = [entry for entry in sys.path if entry not in (here, '')]\n"
        "del sys.modules['xxhash']\n"
        "import xxhash\n"
    )
    search = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[3])])
    process = subprocess.Popen(
        [sys.executable, "-m", "trainer", "train", f"trainer.run_dir={tmp_path}/run"], cwd=tmp_path, text=True,
        env={**os.environ, "PYTHONPATH": search}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert "importing\n" in iter(process.stdout.readline, ""), "after the name of a stage that takes long"
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate()
    assert (process.returncode, errors) == (EXIT_STATUS, "")
    assert output.splitlines()[-1].startswith("stopped by SIGTERM before the first step")
