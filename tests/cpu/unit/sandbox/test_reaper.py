"""The reaper: whatever a worker leaves, it ends, and it ends with the exit code of the worker."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe

import pytest

from tests.support.jobs import has_ended, wait_until
from trainer.sandbox import reaper


def ends(pipe: Connection, code: int) -> None:
    """A worker that leaves a daemon behind. It tells the ids of both, and the limits of the process."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            pipe.send((os.getpid(), os.getppid()))
            time.sleep(600)
        os._exit(0)
    pipe.recv()
    os._exit(code) if code >= 0 else os.kill(os.getpid(), -code)


def waits(pipe: Connection) -> None:
    pipe.send((os.getpid(), os.getpgid(0)))
    time.sleep(600)


def raises(pipe: Connection) -> None:
    raise RuntimeError("in user code")


def shares(pipe: Connection) -> None:
    code = (
        "import time; from multiprocessing.shared_memory import SharedMemory\n"
        "memory = SharedMemory(create=True, size=10); print(memory.name, flush=True); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pipe.send(process.stdout.readline().strip())
    time.sleep(600)


def forks(pipe: Connection) -> None:
    """Processes that fork without end: never more than 12, each for at most 10 s. Those that live so long say so."""
    places, mine, end = [os.memfd_create("place") for _ in range(12)], None, time.monotonic() + 10
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    pipe.send("forks")
    while time.monotonic() < end:
        for place in places:
            taken = os.open(f"/proc/self/fd/{place}", os.O_RDWR)  # a lock of it lasts until the child has ended
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(taken, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fork() == 0:
                    if mine is not None:
                        os.close(mine)
                    mine = taken
                    break
            os.close(taken)
    pipe.send("has ended by itself")
    os._exit(0)


def start(serve: Callable[..., None], *arguments: int, driver: int | None = None) -> tuple[int, Connection]:
    """Start a reaper as a child of this process; return its id and the driver's end of the pipe."""
    ours, theirs = Pipe()
    process = os.fork()
    if process == 0:
        try:
            ours.close()
            reaper.main(driver or os.getppid(), theirs.fileno(), f"{__name__}:{serve.__name__}", list(arguments))
        finally:
            os._exit(99)
    theirs.close()
    return process, ours


def status_of(process: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


@pytest.mark.parametrize(("code", "status"), [(0, 0), (3, 3), (-signal.SIGKILL, 128 + signal.SIGKILL)])
def test_a_worker_s_daemon_ends_with_it_and_the_reaper_has_its_exit_code(code, status):
    process, pipe = start(ends, code)
    daemon, _ = pipe.recv()
    assert not has_ended(daemon)
    pipe.send("go")
    assert status_of(process) == status
    assert has_ended(daemon), "the reaper waits until it has ended"


def test_sigterm_ends_the_worker():
    process, pipe = start(waits)
    worker, group = pipe.recv()
    assert group == worker, "`kill 0` in user code does not reach the reaper"
    os.kill(process, signal.SIGTERM)
    assert status_of(process) == 0 and has_ended(worker)


def test_processes_that_fork_without_end_are_ended():
    process, pipe = start(forks)
    assert pipe.recv() == "forks"
    time.sleep(0.5)
    os.kill(process, signal.SIGTERM)
    assert status_of(process) == 0
    with pytest.raises(EOFError):
        pipe.recv()


def test_shared_memory_of_processes_that_are_ended_is_freed():
    process, pipe = start(shares)
    name = pipe.recv()
    assert os.path.exists(f"/dev/shm/{name}")
    os.kill(process, signal.SIGTERM)
    assert status_of(process) == 0 and not os.path.exists(f"/dev/shm/{name}")


def test_the_death_of_the_reaper_ends_the_worker():
    process, pipe = start(waits)
    worker, _ = pipe.recv()
    os.kill(process, signal.SIGKILL)
    assert status_of(process) == -signal.SIGKILL
    wait_until(lambda: has_ended(worker))


def test_a_reaper_whose_driver_is_gone_ends():
    """Here its parent is another process than its driver, as after the driver's death."""
    process, _ = start(waits, driver=1)
    assert status_of(process) == 0


def test_an_exception_of_the_worker_is_printed_and_is_status_1(capfd):
    process, _ = start(raises)
    assert status_of(process) == 1
    assert "RuntimeError: in user code" in capfd.readouterr().err
