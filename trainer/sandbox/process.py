"""The driver's end of a process that runs user code: its pipe, its output, its end."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import psutil

from trainer.errors import one_line
from trainer.sandbox import limits


class ProcessDied(Exception):
    """A process of the sandbox can no longer be used."""


class SandboxedProcess:
    """One process that runs user code, with its reaper (see `trainer.sandbox.reaper`).

    Args:
        serve: import path `module:function` of the function that serves there. It is called with the `Connection` of
            the pipe and the arguments. What it sends must be JSON.
        name: says in the command line what the process is for.
    """

    def __init__(self, serve: str, arguments: Sequence[Any], environment: Mapping[str, str], name: str = ""):
        self.pipe, worker_end = multiprocessing.Pipe()
        self.output, output = os.pipe()  # descriptor of what the process prints (see `OutputCapture`)
        os.set_blocking(self.output, False)
        with contextlib.closing(socket.socket(fileno=os.dup(self.pipe.fileno()))) as end:
            for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):  # user code may block or corrupt the other end
                end.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", limits.PIPE_S, 0))
        # All users of the machine can read a command line, and it has a largest length. A pipe could be full.
        with open(os.memfd_create("arguments"), "w+") as given:
            json.dump(arguments, given)
            given.seek(0)
            code = (
                f"import sys; sys.path[:] = {sys.path!r}; import json; from trainer.sandbox.reaper import main; "
                f"main({os.getpid()}, {worker_end.fileno()}, {serve!r}, json.load(open({given.fileno()})))  # {name}"
            )
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[worker_end.fileno(), given.fileno()],
                env=environment,
                start_new_session=True,  # only the driver handles signals to the job
            )
        worker_end.close()
        os.close(output)

    def send(self, message: bytes) -> None:
        """Send a message (see `encode`). ProcessDied: the process does not take it."""
        try:
            self.pipe.send_bytes(message)
        except OSError as error:
            raise ProcessDied from error

    def receive(self, largest: int = limits.LARGEST_MESSAGE) -> Any:
        """Return the next message. ProcessDied: it has ended, or user code wrote into the pipe, or too much."""
        try:
            return json.loads(self.pipe.recv_bytes(maxlength=largest))
        except (EOFError, OSError, ValueError, RecursionError) as error:
            raise ProcessDied from error

    @property
    def is_stopped(self) -> bool:
        """Whether the process was stopped (SIGSTOP): then user code is not to blame for its missing answer."""
        with contextlib.suppress(psutil.Error):
            reaper = psutil.Process(self.process.pid)
            return any(one.status() == psutil.STATUS_STOPPED for one in (reaper, *reaper.children()))
        return False

    def end(self, died: bool = False) -> str:
        """End the process and all that it has started. Return how it ended. `close` must follow. `died`: it is ending
        by itself; wait for its exit status."""
        self.pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(limits.DEATH_S if died else 0)
        self.process.terminate()
        try:
            code = self.process.wait(limits.STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        if code > 128:
            with contextlib.suppress(ValueError):
                hint = ", perhaps because memory ran out" if code - 128 == signal.SIGKILL else ""
                return f"killed by {signal.Signals(code - 128).name}{hint}"
        return f"exit status {code}"

    def close(self) -> None:
        os.close(self.output)


def encode(message: Any) -> bytes:
    return json.dumps(message, default=str).encode()  # Parquet rows may hold dates


def end_all(processes: Sequence[SandboxedProcess]) -> None:
    """End the processes at the same time, and close their output."""
    for process in processes:
        process.process.terminate()
    for process in processes:
        process.end()
        process.close()


class OutputCapture:
    """What processes of the sandbox have printed, up to a limit. `label` names their kind in front of each line."""

    def __init__(self, label: str):
        self._label = label
        self._text = bytearray()
        self._left_out = 0
        self._lock = threading.Lock()  # one thread reads, others take

    def read(self, process: SandboxedProcess) -> None:
        with contextlib.suppress(BlockingIOError):
            data = os.read(process.output, 1 << 20)
            with self._lock:
                kept = data[: max(0, limits.OUTPUT_BYTES - len(self._text))]
                self._text += kept
                self._left_out += len(data) - len(kept)

    def last_line(self) -> str:
        """Return the last line that was printed since the last `take`; empty if there is none."""
        lines = self._text.decode(errors="replace").strip().splitlines()
        return one_line(lines[-1]) if lines else ""

    def take(self) -> list[str]:
        """Return the lines that were printed since the last call, shortened."""
        with self._lock:
            text, more = self._text.decode(errors="replace"), self._left_out
            self._text, self._left_out = bytearray(), 0
        lines = [one_line(line) for line in text.splitlines() if line.strip()]
        more += sum(len(line) for line in lines[limits.OUTPUT_LINES :])
        shown = [f"[{self._label}] {line}" for line in lines[: limits.OUTPUT_LINES]]
        return [*shown, f"[{self._label}] … {more} more bytes of output are not shown"] if more else shown
