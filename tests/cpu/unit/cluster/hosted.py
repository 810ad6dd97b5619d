"""Objects that workers of the tests host. Slow modules are imported only when they are needed."""

from __future__ import annotations

import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from trainer.errors import UserError


class Host:
    """Has the methods and the failures of a rank."""

    def __init__(self, *args: Any):
        self.args = args
        self._opened = threading.Event()

    def echo(self, *args: Any, **kwargs: Any) -> tuple[tuple, dict]:
        return args, kwargs

    def built_with(self) -> tuple:
        return self.args

    def rank(self) -> int:
        return self.args[0]

    def raise_user_error(self) -> None:
        raise UserError("choose another")

    def raise_odd_error(self) -> None:
        raise OddError(1, 2)

    def fail_after_peer(self) -> None:
        """Rank 1 fails first, with an error that the failure of rank 0 has caused."""
        if self.rank() == 1:
            raise RuntimeError("[gloo] Connection closed by peer")
        time.sleep(0.3)
        raise ValueError("the cause")

    def raise_or_die(self) -> None:
        if self.rank() == 1:
            self.is_killed()
        raise RuntimeError("Connection reset by peer")

    def exit(self) -> None:
        sys.exit(3)

    def is_killed(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def wants_a_tensor(self) -> None:
        import torch

        self._limit()
        torch.zeros(10**9)

    def wants_bytes(self) -> None:
        self._limit()
        bytearray(10**9)

    def fills_the_gpu(self) -> None:
        import torch

        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has 1 GiB free")

    def pid(self) -> int:
        return os.getpid()

    def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    def import_path(self) -> list[str]:
        return sys.path

    def has_imported(self, module: str) -> bool:
        return module in sys.modules

    def inherited(self, descriptor: int) -> tuple[bool, set[int], object, int]:
        """Return whether a descriptor is open, the blocked signals, the handler of SIGALRM, and how many log handlers
        there are."""
        names = ("", "trainer")
        handlers = [handler for name in names for handler in logging.getLogger(name or None).handlers]
        mask = {int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())}
        return os.path.exists(f"/proc/self/fd/{descriptor}"), mask, signal.getsignal(signal.SIGALRM), len(handlers)

    def parent(self) -> int:
        return os.getppid()

    def child(self) -> int:
        """Start a process of its own; returns its id."""
        return subprocess.Popen(["sleep", "600"]).pid

    def waits(self, seconds: float = 600) -> str:
        time.sleep(seconds)
        return "waited"

    def waits_a_little(self) -> str:
        return self.waits(1)

    def wait_for_open(self) -> bool:
        return self._opened.wait(60)

    def open(self) -> None:
        self._opened.set()

    @staticmethod
    def _limit() -> None:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, resource.getrlimit(resource.RLIMIT_AS)[1]))


class OddError(Exception):
    """Cannot be unpickled."""

    def __init__(self, left: int, right: int):
        super().__init__(f"{left} and {right}")


class SlowToLoad(Host):
    def __init__(self, *args: Any):
        super().__init__(*args)
        time.sleep(8)


class LoadsAfterEngine(Host):
    """Waits until an `OpensRanks` exists."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        end = time.monotonic() + 120
        while not os.path.exists(os.environ["OPENED"]):
            if time.monotonic() > end:
                raise TimeoutError("no engine has started")
            time.sleep(0.01)


class OpensRanks(Host):
    def __init__(self, *args: Any):
        super().__init__(*args)
        Path(os.environ["OPENED"]).touch()


class FailsToLoad(Host):
    def __init__(self, *args: Any):
        super().__init__(*args)
        raise ValueError("cannot load")
