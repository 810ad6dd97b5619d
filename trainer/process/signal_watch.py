"""A process that kills its parent after a third signal, when the parent can no longer exit by itself.

Python handles no signal during a long call of a C library. The C code of Python still writes each signal into a pipe at
the moment it arrives (`signal.set_wakeup_fd`). This process reads the pipe and counts. It runs as a script without the
packages of the job, so it needs only a few milliseconds and little memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time

_PR_SET_PDEATHSIG = 1


def main(driver: int, handled: set[int], same_request_s: float, grace_period_s: float, text: str) -> None:
    """Kill `driver` when it survives its third signal for `grace_period_s`. The pipe is standard input."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # exit with the driver
    if os.getppid() != driver:  # it died before that took effect
        return
    os.closerange(3, 1024)  # inherited pipes, on whose end others may wait
    count, last_s = 0, 0.0
    while data := os.read(0, 65536):
        now = time.monotonic()
        for _ in filter(handled.__contains__, data):
            count, last_s = count + (count == 0 or now - last_s >= same_request_s), now
        if count >= 3:
            time.sleep(grace_period_s)
            with contextlib.suppress(OSError):
                os.write(2, f"{text}\n".encode())
            os.kill(driver, signal.SIGKILL)


if __name__ == "__main__":
    _, pid, numbers, same_s, grace_s, words = sys.argv
    main(int(pid), {int(number) for number in numbers.split(",")}, float(same_s), float(grace_s), words)
