"""The process that starts Ray for one run and kills all processes of Ray (see `ray_head`).

It runs as a script. It imports only Ray and psutil, and nothing of `trainer`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import sys
from typing import Any, NoReturn

import psutil

END = b"end"
"""The driver writes this before it closes the pipe. A driver that is killed, or that Ray ends, does not write it."""
END_SIGNAL = signal.SIGUSR1
"""Ends the supervisor. Not SIGTERM: Ray's C++ code installs a SIGTERM handler that aborts the process."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def main() -> None:
    """Start Ray, send its address to the driver, wait until the driver exits, then kill all processes of Ray."""
    options = json.loads(sys.argv[1])
    directory = options.pop("directory")
    daemons: dict[str, int] = {}

    def end(*_: object) -> NoReturn:
        # The handler does all the work itself, because an exception could be lost in a library's callback.
        for number in (END_SIGNAL, signal.SIGTERM):
            signal.signal(number, lambda *_: None)  # SIG_IGN: Python would write an error on a signal just before
        for name, pid in daemons.items():  # if one has died, Ray has ended the driver without a message
            if not psutil.pid_exists(pid) or not is_running(psutil.Process(pid)):
                text = f"error: Ray's {name} died, and the job with it; restart it with the same command\n"
                os.write(2, text.encode())
                break
        end_descendants()
        shutil.rmtree(directory, ignore_errors=True)
        os._exit(0)  # Ray's own shutdown could wait for processes that have exited

    adopt_orphans()
    # A process that the driver has forked may keep the pipe open. So the kernel also signals the death of the driver.
    signal_on_death_of_parent(END_SIGNAL)
    for number in (END_SIGNAL, signal.SIGTERM):
        signal.signal(number, end)
    try:
        answer = _start_ray(os.path.join(directory, "ray"), options)
        signal.signal(signal.SIGTERM, end)  # Ray's C++ code has installed its own handler
        daemons.update(answer.get("daemons", {}))
        os.write(1, json.dumps(answer).encode() + b"\n")
        last = b""
        while data := os.read(0, 1024):  # until the driver closes the pipe or dies
            last = data
        if last == END:
            daemons.clear()
    finally:
        end()


def _start_ray(directory: str, options: dict[str, Any]) -> dict[str, Any]:
    import ray
    from ray._private import utils
    from ray._private.node import Node

    utils.set_sigterm_handler = lambda _: None  # this process has its own
    # A job uses none of these processes, and each of them imports for half a second.
    Node.start_monitor = Node.start_log_monitor = lambda _: None
    if os.environ.get("RAY_USAGE_STATS_ENABLED") != "1":  # it sends the reports, and Ray waits until it has started
        Node.start_api_server = lambda *_, **__: None
    try:
        quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
        ray.init(address="local", _temp_dir=directory, **quiet, **options)
    except Exception as error:
        return {"error": " ".join(str(error).split())[:1000]}
    daemons = {child.name(): child.pid for child in psutil.Process().children()}
    named = {name: pid for name, pid in daemons.items() if name in ("gcs_server", "raylet")}
    return {"address": ray.get_runtime_context().gcs_address, "daemons": named}


def adopt_orphans() -> None:
    """Become the parent of all descendants whose parent dies, so that `end_descendants` finds them."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def signal_on_death_of_parent(number: signal.Signals) -> None:
    """Let the kernel send a signal to this process when the thread that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def end_descendants() -> None:
    """Kill all descendants of this process, and wait until they have exited."""
    for _ in range(100):  # a process may start another one just before it exits
        children = [child for child in psutil.Process().children(recursive=True) if is_running(child)]
        if not children:
            return
        end_all(children)
        psutil.wait_procs(children, timeout=0.1)


def is_running(process: psutil.Process) -> bool:
    """Return whether a process still runs. A zombie has exited, even if its parent never reaps it."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def end_all(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


if __name__ == "__main__":
    main()
