"""The process that kills a job which can no longer end itself.

Python runs its signal handlers between two instructions, and its threads switch there. So a long call of a C function
that holds the interpreter's lock delays both without limit. This process detects two cases:

- A third signal. The C code of Python writes each signal into a pipe at the moment it arrives
  (`signal.set_wakeup_fd`). This process reads the pipe and counts.
- Missing heartbeats. A thread of the job writes heartbeats into another pipe (`Signals.send_heartbeat`), each with the
  time after which the next heartbeat is late.

It runs as a script without the packages of the job, so it needs only a few milliseconds and little memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time

_SIGNALS, _HEARTBEATS = 0, 3  # descriptors
_LONGEST_INTERVAL_S = 1.0
_COMMAND_S = 30.0


class HeartbeatTimer:
    """Measures how long a process has sent no heartbeat although it could have run."""

    def __init__(self, driver: int):
        self._driver = driver
        self._rest = b""
        self._ticks = -1
        self._age_s = 0.0
        self._last_s = time.monotonic()
        self.limit_s: float | None = None
        """None: heartbeats are not expected."""
        self.text = ""
        self.command: list[str] = []

    @property
    def interval_s(self) -> float | None:
        """Seconds until the next check, or None if no check is needed."""
        return None if self.limit_s is None else min(_LONGEST_INTERVAL_S, self.limit_s / 8)

    def receive(self, data: bytes) -> None:
        """Process the data that the process has written to the pipe."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if lines:
            self.limit_s, self.text, self.command = json.loads(lines[-1])
            self._age_s, self._last_s = 0.0, time.monotonic()

    def is_expired(self) -> bool:
        """Add the time since the last check, and return whether the limit is exceeded."""
        now = time.monotonic()
        seconds, self._last_s = now - self._last_s, now
        if self.limit_s is None:
            return False
        if self._could_run():
            # The interval is longer than planned if the whole job was stopped for a while.
            self._age_s += min(seconds, 2 * (self.interval_s or 0.0))
        return self._age_s > self.limit_s

    def _could_run(self) -> bool:
        """Return whether the process was neither stopped nor without a processor since the last check."""
        states, ticks = set(), 0
        with contextlib.suppress(OSError):  # a thread has ended meanwhile
            for thread in os.listdir(f"/proc/{self._driver}/task"):
                with open(f"/proc/{self._driver}/task/{thread}/stat") as file:
                    fields = file.read().rpartition(")")[2].split()
                states.add(fields[0])
                ticks += int(fields[11]) + int(fields[12])
        has_run, self._ticks = ticks != self._ticks, ticks
        return not states & {"T", "t"} and (has_run or "R" not in states)


def main(driver: int, handled: set[int], same_request_s: float, grace_period_s: float, text: str) -> None:
    """Kill `driver` when it survives its third signal for `grace_period_s`, or when its heartbeats stop."""
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: exit with the driver
    if os.getppid() != driver:  # it died before that took effect
        return
    for descriptor in map(int, os.listdir("/proc/self/fd")):  # inherited pipes, on whose end others may wait
        if descriptor not in (0, 1, 2, _HEARTBEATS):
            with contextlib.suppress(OSError):
                os.close(descriptor)
    count, last_s, timer = 0, 0.0, HeartbeatTimer(driver)
    while True:
        ready, _, _ = select.select([_SIGNALS, _HEARTBEATS], [], [], timer.interval_s)
        inputs = {descriptor: os.read(descriptor, 65536) for descriptor in ready}
        if b"" in inputs.values():
            return
        now = time.monotonic()
        for _ in filter(handled.__contains__, inputs.get(_SIGNALS, b"")):
            count, last_s = count + (count == 0 or now - last_s >= same_request_s), now
        if count >= 3:
            select.select([], [], [], grace_period_s)
            _kill(driver, text)
        if _HEARTBEATS in inputs:
            timer.receive(inputs[_HEARTBEATS])
        elif timer.is_expired():
            _run(timer.command)
            if not select.select([_HEARTBEATS], [], [], 0)[0]:
                _kill(driver, timer.text)


def _run(command: list[str]) -> None:
    import subprocess

    if command:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run(command, stdin=subprocess.DEVNULL, timeout=_COMMAND_S)


def _kill(driver: int, text: str) -> None:
    _write_to_log(driver, text)
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode())
    os.kill(driver, signal.SIGKILL)


def _write_to_log(driver: int, text: str) -> None:
    """Append the text to the log of the run (see `trainer.process.log_setup.LogFile`), which the driver has open."""
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
