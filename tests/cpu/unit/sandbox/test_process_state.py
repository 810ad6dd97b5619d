"""A process is what it was before a call, or it says that it must be replaced. Each test runs in a fork."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Pipe

import pytest

from trainer.sandbox.process_state import ProcessState


def in_fork(change: Callable[[], object], check: Callable[[ProcessState], object]) -> None:
    """Take the state, call `change`, and then `check`, whose exceptions fail the test."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(60)
            with Pipe()[0] as pipe:
                state = ProcessState(pipe)
                change()
                check(state)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def restored(state: ProcessState) -> None:
    assert state.restore()
    assert os.getcwd() == DIRECTORY and "CHANGED" not in os.environ and os.environ["PATH"] == PATH
    assert sys.stdout is STDOUT and os.umask(0) == UMASK
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == BLOCKED
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == FILES


def replaced(state: ProcessState) -> None:
    assert not state.restore()


@pytest.fixture(autouse=True)
def before():
    """What a restored process has again."""
    global DIRECTORY, PATH, STDOUT, UMASK, BLOCKED, FILES
    DIRECTORY, PATH, STDOUT, UMASK = os.getcwd(), os.environ["PATH"], sys.stdout, os.umask(0o022)
    os.umask(UMASK)
    BLOCKED = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    FILES = resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def test_what_a_call_has_changed_is_restored():
    for change in [
        lambda: os.chdir("/"),
        lambda: (os.environ.update(CHANGED="1"), os.environ.pop("PATH")),
        lambda: setattr(sys, "stdout", None),
        lambda: os.umask(0o777),
        lambda: signal.signal(signal.SIGUSR1, signal.SIG_IGN),
        lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}),
        lambda: signal.setitimer(signal.ITIMER_REAL, 30),
        lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1])),
    ]:
        in_fork(change, restored)


@pytest.mark.parametrize(
    "change",
    [
        lambda: os.close(1),
        lambda: os.dup2(os.open("/dev/null", os.O_WRONLY), 2),
        lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)),
    ],
    ids=["a closed descriptor", "a descriptor of another file", "a hard limit"],
)
def test_a_process_that_cannot_be_restored_is_replaced(change):
    in_fork(change, replaced)


def test_a_directory_that_is_gone_cannot_be_restored(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def change() -> None:
        os.chdir("/")
        tmp_path.rmdir()

    in_fork(change, replaced)


def test_a_process_that_runs_after_the_call_is_named_and_one_that_ends_is_not():
    def named(state: ProcessState) -> None:
        assert state.processes_left() == "sleep"

    def unnamed(state: ProcessState) -> None:
        assert state.processes_left() == ""

    in_fork(lambda: subprocess.Popen(["sleep", "60"]), named)
    in_fork(lambda: subprocess.Popen(["sleep", "0.1"]), unnamed)
    in_fork(lambda: time.sleep(0), unnamed)
