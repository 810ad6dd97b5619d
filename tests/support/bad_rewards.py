"""A reward function that does what its completion names; unit/rewards/test_worker.py scores with it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from decimal import Decimal
from pathlib import Path

import numpy as np

MEGABYTES_50 = 50_000_000


class Odd(BaseException):
    pass


class Unreadable(Exception):
    def __str__(self) -> str:
        raise KeyboardInterrupt


class EndlessText(Exception):
    def __str__(self) -> str:
        time.sleep(1000)
        return ""


class HostileFloat(float):
    def __float__(self) -> float:
        raise GeneratorExit("hostile")


async def later() -> float:
    return 1.0


def remember(pid: int) -> None:
    """Write down a process that the test expects to end."""
    with open(Path(__file__).with_name("pids.txt"), "a") as file:
        file.write(f"{pid}\n")


def leave_daemon() -> float:
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            remember(os.getpid())
            os.closerange(0, 100)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(1000)
        os._exit(0)
    os.wait()
    while not Path(__file__).with_name("pids.txt").exists():
        time.sleep(0.01)
    return 1.0


def leave_daemon_and_hang() -> float:
    leave_daemon()
    time.sleep(1000)
    return 1.0


def raise_(error: BaseException) -> float:
    raise error


def segfault() -> float:
    ctypes.string_at(0)
    return 1.0


def run_out_of_memory() -> float:
    resource.setrlimit(resource.RLIMIT_AS, (1 << 31, resource.getrlimit(resource.RLIMIT_AS)[1]))
    return float(len(bytearray(1 << 33)))


def close_all() -> float:
    os.closerange(0, 4096)
    return 1.0


def garble() -> float:
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2:
            with contextlib.suppress(OSError):
                os.write(descriptor, b"garbage" * 100)
    return 1.0


def stop() -> float:
    os.kill(os.getpid(), signal.SIGSTOP)
    return 1.0


BAD = {
    "raises KeyboardInterrupt": (lambda: raise_(KeyboardInterrupt()), "raised KeyboardInterrupt"),
    "raises GeneratorExit": (lambda: raise_(GeneratorExit()), "raised GeneratorExit"),
    "raises SystemExit": (lambda: sys.exit("oh"), "raised SystemExit: oh"),
    "raises a BaseException": (lambda: raise_(Odd("odd")), "raised Odd: odd"),
    "raises what cannot be read": (lambda: raise_(Unreadable()), "raised Unreadable: its text cannot be read"),
    "raises 50 MB": (lambda: raise_(ValueError("x\x1b[31m\n" * (MEGABYTES_50 // 7))), "raised ValueError: x?[31m x"),
    "raises a text that never comes": (lambda: raise_(EndlessText()), "took longer than reward.timeout_s=2"),
    "returns 50 MB": (lambda: "1" * MEGABYTES_50, "returned str, which is not a number"),
    "returns text": (lambda: "1.0", "returned str, which is not a number"),
    "returns None": (lambda: None, "returned NoneType, which is not a number"),
    "returns complex": (lambda: 1j, "returned complex, which is not a number"),
    "returns a coroutine": (lambda: later(), "returned coroutine, which is not a number"),
    "returns a hostile float": (lambda: HostileFloat(1), "raised GeneratorExit: hostile"),
    "returns an array": (lambda: np.ones(3), "raised TypeError: "),
    "returns nan": (lambda: float("nan"), "is nan"),
    "returns -inf": (lambda: float("-inf"), "is -inf"),
    "returns 1e308": (lambda: 1e308, "is 1e+308, beyond 1e+12"),
    "returns -1e13": (lambda: np.float64(-1e13), "is -1e+13, beyond 1e+12"),
    "returns 10**400": (lambda: 10**400, "raised OverflowError: "),
    "exits": (lambda: os._exit(0), "ended its process (exit status 0)"),
    "exits with 3": (lambda: os._exit(3), "ended its process (exit status 3)"),
    "segfaults": (segfault, "ended its process (killed by SIGSEGV)"),
    "is killed": (lambda: os.kill(os.getpid(), signal.SIGKILL), "ended its process (killed by SIGKILL, perhaps"),
    "kills its group": (lambda: os.killpg(0, signal.SIGTERM), "ended its process (killed by SIGTERM)"),
    "stops itself": (stop, "ended its process (stopped by a signal)"),
    "hangs": (lambda: time.sleep(1000), "took longer than reward.timeout_s=2"),
    "runs out of memory": (run_out_of_memory, "raised MemoryError"),
    "closes all files": (close_all, "ended its process (exit status 1)"),
    "writes into all files": (garble, "ended its process ("),
    "leaves a daemon and hangs": (leave_daemon_and_hang, "took longer than reward.timeout_s=2"),
}  # name: (what it does, how the reason begins)


def fork_and_return() -> float:
    if os.fork() == 0:
        return 5.0
    os.wait()
    return 1.0


def returning(change: object) -> float:
    return 1.0


CARELESS = {
    "leaves a thread": lambda: returning(threading.Thread(target=time.sleep, args=(1000,)).start()),
    "forks and returns twice": fork_and_return,
    "lets a child end": lambda: returning(subprocess.Popen(["true"])),
    "prints": lambda: returning(print("hello\x1b[2J", flush=True)),
    "prints 50 MB": lambda: returning(os.write(2, b"x" * 1000 + b"\n") and print("line of text\n" * 4_000_000)),
}  # these all give 1.0

NUMBERS = {
    "True": lambda: True, "int": lambda: 1, "numpy": lambda: np.float32(1), "numpy bool": lambda: np.bool_(True),
    "0-d array": lambda: np.asarray(1.0), "Decimal": lambda: Decimal(1),
}  # fmt: skip


def score(completion: str, answer: str) -> float:
    if completion.startswith("waits "):
        time.sleep(float(answer))
        if completion == "waits and closes all files":
            os.closerange(3, 4096)
            time.sleep(1000)
        return float(os.getpid()) if completion == "waits and returns its process" else 1.0
    if completion in BAD:
        return BAD[completion][0]()
    if completion in CARELESS:
        return CARELESS[completion]()
    if completion in NUMBERS:
        return NUMBERS[completion]()
    return float(completion)
