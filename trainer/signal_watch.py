"""The process that kills a job after its third signal, if the job itself can no longer handle signals.

Python runs its signal handlers between two instructions, so a long call of a C function delays them without limit. But
the C part of Python writes each signal into a pipe at the moment it arrives (`signal.set_wakeup_fd`). This process
reads the pipe, and counts.

It runs as a script, without the packages of the job, so that it needs few milliseconds and little memory.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time


def main(driver: int, handled: set[int], same_request_s: float, patience_s: float, text: str) -> None:
    """Count the signals that arrive on stdin, and kill `driver` when it survives the third one for `patience_s`."""
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: end with the driver
    if os.getppid() != driver:  # it died before that took effect
        return
    for descriptor in map(int, os.listdir("/proc/self/fd")):  # others may wait for the end of what it was passed
        if descriptor > 2:
            with contextlib.suppress(OSError):
                os.close(descriptor)
    count, last_s = 0, 0.0
    while count < 3:
        numbers = os.read(0, 512)
        if not numbers:
            return
        now = time.monotonic()
        for _ in filter(handled.__contains__, numbers):
            count, last_s = count + (count == 0 or now - last_s >= same_request_s), now
    select.select([], [], [], patience_s)
    _write_to_log(driver, text)
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode())
    os.kill(driver, signal.SIGKILL)


def _write_to_log(driver: int, text: str) -> None:
    """Append the text to the log of the run (see `trainer.output.LogFile`), which the driver has open."""
    folder = f"/proc/{driver}/fd"
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if os.path.basename(os.readlink(f"{folder}/{name}")) == "log.txt":
                with open(f"{folder}/{name}", "a") as file:
                    file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
                return


if __name__ == "__main__":
    _, pid, numbers, same_s, wait_s, words = sys.argv
    main(int(pid), {int(number) for number in numbers.split(",")}, float(same_s), float(wait_s), words)
