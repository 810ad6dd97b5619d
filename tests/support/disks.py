"""Ranks whose working directories stand for the disks of several nodes.

`DISK` means another directory in every process: the one below its own working directory.
"""

from __future__ import annotations

import ctypes
import os
import socket
from dataclasses import dataclass

_NEW_NAME = 0x04000000  # CLONE_NEWUTS
DISK = "/proc/self/cwd/disk"


@dataclass(frozen=True)
class Process:
    """What a test asks of the process of a rank (see `TrainWorkers.ask`)."""

    def live_on(self, home: str) -> None:
        os.chdir(home)

    def pid(self) -> int:
        return os.getpid()

    def set(self, name: str, value: str) -> None:
        os.environ[name] = value

    def get(self, name: str) -> str | None:
        return os.environ.get(name)

    def move(self, host: str) -> None:
        """Let the machine of this process have another name."""
        if ctypes.CDLL(None).unshare(_NEW_NAME):
            raise PermissionError("this process cannot have a host name of its own")
        socket.sethostname(host)

    def forget(self, prefix: str) -> None:
        """Unset the environment variables with this prefix."""
        for name in [name for name in os.environ if name.startswith(prefix)]:
            del os.environ[name]
