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
import signal
import sys
import time

END = signal.SIGRTMIN
"""Ends this process. The kernel sends it when the driver dies."""
_PR_SET_PDEATHSIG = 1


def main(driver: int, handled: set[int], same_request_s: float, grace_period_s: float, text: str) -> None:
    """Kill `driver` when it survives its third signal for `grace_period_s`. The pipe is standard input."""
    started: dict[int, str] = {}  # start times by process id

    def end(*_: object) -> None:
        for pid, since in started.items():
            if _start_time(pid) == since:
                _kill(pid)
        os._exit(0)

    import ctypes  # the driver, which imports this module for `END`, does not need it

    signal.signal(END, end)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, END, 0, 0, 0)
    if os.getppid() != driver:  # it died before that took effect
        return
    os.closerange(3, 1024)  # inherited pipes, on whose end others may wait
    count, last_s, ids = 0, 0.0, b""
    while data := os.read(0, 65536):
        now = time.monotonic()
        *known, ids = (ids + bytes(byte & 127 for byte in data if byte > 127)).split(b";")
        started |= {int(pid): _start_time(int(pid)) for pid in known}
        for _ in filter(handled.__contains__, data):
            count, last_s = count + (count == 0 or now - last_s >= same_request_s), now
        if count >= 3:
            time.sleep(grace_period_s)
            with contextlib.suppress(OSError):
                os.write(2, f"{text}\n".encode())
            os.kill(driver, signal.SIGKILL)
    end()


def _start_time(pid: int) -> str:
    """Return the start time of a process, which tells reused ids apart; empty: it has ended."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[19]
    return ""


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
