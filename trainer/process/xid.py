"""GPU errors in messages of the NVIDIA driver and of CUDA, and where the kernel logs them."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass

from trainer.process import time_limits

_XID = re.compile(r"\bXid\b(?: \([^)]*\))?:?\s*(\d{1,3})\b")

# NVIDIA's Xid catalog (docs.nvidia.com/deploy/xid-errors) gives an action for each code. Other codes: restart.
_OF_PROGRAMS = frozenset({11, 13, 25, 31, 32, 43, 69, 80})
"""Codes that a faulty program causes."""
_HARMLESS = frozenset({14, 37, 38, 44, 45, 63, 66, 67, 92, 93, 106, 107, 121, 137, 141, 152, 153, 154, 157, 161})
"""Codes that need no action or repeat another code."""
_BROKEN = frozenset(
    {46, 48, 54, 62, 64, 74, 79, 95, 109, 110, 119, 120, 136, 140, *range(143, 152), 155, 156, 158, 160, 162}
)
"""Codes after which the GPU or the whole machine must be reset or repaired."""

_BROKEN_TEXTS = re.compile(
    r"uncorrectable (ECC|NVLink) error|fallen off the bus|GPU is lost|NVLink error|"
    r"Unable to determine the device handle|no CUDA-capable device is detected",
    re.IGNORECASE,
)
_FAILED_TEXTS = re.compile(
    r"hardware error|CUDA-capable device\(s\) is/are busy or unavailable|system not yet initialized", re.IGNORECASE
)
_PROGRAM_TEXTS = re.compile(r"illegal memory access|device-side assert", re.IGNORECASE)

KERNEL_LOGS = ["/dev/kmsg", "/var/log/kern.log", "/var/log/messages", "/var/log/syslog"]
"""Where the kernel's messages are. The first readable file is used."""
_TAIL_BYTES = 2**20
_LONGEST_RECORD = 8192
_UPTIME = re.compile(r"\[\s*(\d+\.\d+)\]")


@dataclass(frozen=True, order=True)
class GpuError:
    """A GPU error that a text reports. The worst error is the greatest."""

    is_broken: bool
    """The GPU does not recover by itself: its node should be drained."""
    is_of_machine: bool
    """True: the machine caused it. False: the program caused it."""
    cause: str
    """A short description, such as `GPU error (Xid 79)`."""


def gpu_error_in(text: str) -> GpuError | None:
    """Return the worst GPU error in a message of the kernel or of a library, or None if there is none."""
    errors = [
        GpuError(code in _BROKEN, code not in _OF_PROGRAMS, f"GPU error (Xid {code})")
        for code in map(int, _XID.findall(text))
        if code not in _HARMLESS
    ]
    if not errors and _BROKEN_TEXTS.search(text):
        errors.append(GpuError(True, True, "GPU error"))
    if not errors and _FAILED_TEXTS.search(text):
        errors.append(GpuError(False, True, "GPU error"))
    if not errors and _PROGRAM_TEXTS.search(text):
        errors.append(GpuError(False, False, "CUDA error"))
    return max(errors, default=None)


def gpu_lines(seconds: float) -> list[str]:
    """Return the messages of this machine's kernel about GPUs in the last `seconds`.

    Empty if this process may not read any kernel log, as in most containers.
    """
    now = time.clock_gettime(time.CLOCK_MONOTONIC)
    for path in KERNEL_LOGS:
        with contextlib.suppress(OSError, ValueError):
            lines = _records(path) if path == "/dev/kmsg" else _tail(path)
            return [
                text
                for uptime, text in lines
                if "NVRM" in text and -time_limits.KERNEL_CLOCK_ERROR_S < now - uptime <= seconds
            ]
    return []


def _records(path: str) -> Iterator[tuple[float, str]]:
    """Yield the records of the kernel's ring buffer, each with the seconds since boot."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        while True:
            try:
                record = os.read(handle, _LONGEST_RECORD).decode(errors="replace")
            except BrokenPipeError:  # the record was overwritten before it was read
                continue
            except BlockingIOError:  # end of the buffer
                return
            head, _, text = record.partition(";")
            yield int(head.split(",")[2]) / 1e6, text.partition("\n")[0]
    finally:
        os.close(handle)


def _tail(path: str) -> Iterator[tuple[float, str]]:
    """Yield the last lines of a log file that contain a kernel time stamp."""
    with open(path, "rb") as file:
        file.seek(max(0, os.path.getsize(path) - _TAIL_BYTES))
        for line in file.read().decode(errors="replace").splitlines():
            if (stamp := _UPTIME.search(line)) is not None:
                yield float(stamp[1]), line[stamp.end() :].strip()
