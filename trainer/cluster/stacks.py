"""The stacks of processes that hang, written to files in the run directory."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

DIRECTORY = "stacks"
"""Directory below the run directory."""
SCRIPT = os.path.abspath(__file__)
"""`python SCRIPT PID RUN_DIR REASON` writes the stack of a driver that can no longer run Python code."""
PY_SPY_S = 10.0
"""Longest time for py-spy. It stands here because this file also runs as a script."""
_PR_SET_PTRACER, _ANY = 0x59616D61, ctypes.c_ulong(-1)


def local_stacks() -> str:
    """Return the Python stacks of all threads of this process."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    threads = [
        f"thread {names.get(ident, ident)}\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    ]
    return "\n".join(threads)


def allow_stacks() -> None:
    """Let any process of this user read the stacks of this process, even where the kernel allows only its parents."""
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _ANY)


def py_spy_stacks(pids: Sequence[int]) -> list[str]:
    """Return the stacks of local processes that do not answer, as py-spy reads them, or why there are none."""
    with ThreadPoolExecutor(max(1, len(pids))) as threads:
        return list(threads.map(_stacks_of, pids))


def _stacks_of(pid: int) -> str:
    tool = shutil.which("py-spy") or shutil.which("py-spy", path=os.path.dirname(sys.executable)) or "py-spy"
    try:
        # Without a pause, because py-spy would wait for a stopped process.
        command = [tool, "dump", "--nonblocking", "--pid", str(pid)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=PY_SPY_S)
    except (OSError, subprocess.SubprocessError) as error:
        return f"The process does not answer, and py-spy failed: {error}\n"
    return result.stdout or f"The process does not answer, and py-spy failed: {result.stderr}\n"


def write_stacks(run_dir: str, reason: str, stacks: dict[str, str]) -> str | None:
    """Write the stacks of processes, by name, to a new directory. Return its path, or None if the write fails."""
    if not os.path.isdir(run_dir):
        return None
    directory = os.path.join(run_dir, DIRECTORY, time.strftime("%Y-%m-%d_%H-%M-%S"))
    with contextlib.suppress(OSError):
        os.makedirs(directory, exist_ok=True)
        for name, text in stacks.items():
            with open(os.path.join(directory, f"{name.replace(' ', '_')}.txt"), "w") as file:
                file.write(f"{reason}\n\n{text}")
        return directory
    return None


if __name__ == "__main__":
    pid, run_dir, reason = sys.argv[1:]
    write_stacks(run_dir, reason, {"driver": _stacks_of(int(pid))})
