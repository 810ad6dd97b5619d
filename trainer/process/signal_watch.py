"""A process beside the driver. It kills the driver after a third signal that the driver cannot handle; and, when the
driver has ended in any way, the processes that modules of the user have started in it.

Python handles no signal during a long call of a C library. The C code of Python still writes each signal into a pipe at
the moment it arrives (`signal.set_wakeup_fd`). This process reads the pipe and counts. The driver writes ids of
processes into the same pipe, such as `123;`, in bytes above 127, which no signal has. This process runs as a script
without the packages of the job, so it needs only a few milliseconds and little memory.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time

END = signal.SIGRTMIN
"""Ends this process, which begins with this signal blocked. The kernel sends it when the driver dies."""
_PR_SET_PDEATHSIG = 1


def main(driver: int, handled: set[int], same_request_s: float, grace_period_s: float, text: str) -> None:
    """Kill `driver` when it survives its third signal for `grace_period_s`. The pipe is standard input."""
    started: dict[int, str | None] = {}  # start times by process id
    ids = b""

    def read() -> bytes:
        """Return the signals in the pipe, and note the process ids; empty: the pipe is closed, or has nothing."""
        nonlocal ids
        with contextlib.suppress(BlockingIOError):
            data = os.read(0, 65536)
            *known, ids = (ids + bytes(byte & 127 for byte in data if byte > 127)).split(b";")
            started.update({int(pid): start_time(int(pid)) for pid in known})
            return data
        return b""

    import ctypes  # the driver, which imports this module, does not need it

    os.closerange(3, 1024)  # inherited pipes, on whose end others may wait
    os.set_blocking(0, False)
    ended, wakeup = os.pipe()  # readable once END has come
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup)
    signal.signal(END, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [END])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, END, 0, 0, 0)
    is_left = os.getppid() != driver  # it died before that took effect
    count, last_s = 0, 0.0
    while not is_left:
        ready = select.select([0, ended], [], [])[0]
        data = read() if 0 in ready else b""
        is_left, now = ended in ready or not data, time.monotonic()
        for _ in filter(handled.__contains__, data):
            count, last_s = count + (count == 0 or now - last_s >= same_request_s), now
        if count >= 3 and not is_left:
            if select.select([ended], [], [], grace_period_s)[0]:  # usually the driver exits by itself
                break
            with contextlib.suppress(OSError):
                os.write(2, f"{text}\n".encode())
            os.kill(driver, signal.SIGKILL)
    while read():  # what the driver has written last
        pass
    for pid, since in started.items():
        if start_time(pid) == since:
            _kill(pid)


def start_time(pid: int) -> str | None:
    """Return the start time of a process of this machine, which tells reused process ids apart; None: it is gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def _kill(pid: int) -> None:
    """Kill a process, and all that it has started."""
    children: list[str] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                children += file.read().split()
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)
    for child in children:
        _kill(int(child))


if __name__ == "__main__":
    _, own, numbers, same_s, grace_s, words = sys.argv
    main(int(own), {int(number) for number in numbers.split(",")}, float(same_s), float(grace_s), words)
