"""A Ray cluster on this machine for one run, closed to everybody else and gone with the run.

A supervisor process (`main` below) starts Ray and waits. It has a session of its own, so that a signal to the
driver's process group does not reach Ray. It ends when the driver closes the pipe between them, which also
happens when the driver is killed, and then ends everything that Ray has started and removes Ray's files.

Ray executes what its clients send. So it listens on the loopback interface alone, every call must carry a random
token of this run, and its sockets and logs are below a directory that only this user can enter.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

import psutil

_LOOPBACK_VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # "0": Ray takes the loopback address for this node
_START_S = 180.0
_CLOSE_S = 20.0
_LONGEST_BASE = 40  # characters; a Unix socket's path may have 107, of which Ray's own part takes up to 60
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class LocalRay:
    """Start the cluster; `address` is where the driver joins it.

    Args:
        num_cpus: logical CPUs.
        object_store_bytes: None: Ray's default.

    Raises:
        RuntimeError: Ray does not start; the message holds Ray's reason.
    """

    def __init__(self, num_cpus: int, object_store_bytes: int | None):
        base = tempfile.gettempdir()
        self.directory = tempfile.mkdtemp(prefix="trainer-", dir=base if len(base) <= _LONGEST_BASE else "/tmp")
        self._environment = _set_environment()
        _follow_environment(True)
        options = {"num_cpus": num_cpus, "directory": self.directory}
        if object_store_bytes is not None:
            options["object_store_memory"] = object_store_bytes
        self._supervisor = subprocess.Popen(
            [sys.executable, "-P", os.path.abspath(__file__), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._daemons: dict[str, psutil.Process] = {}

    def connect(self) -> str:
        """Wait until Ray is up; returns its address."""
        answer = self._answer()
        if "error" in answer:
            self.close()
            raise RuntimeError(f"Ray does not start on this machine: {answer['error']}")
        for name, pid in answer["daemons"].items():
            with contextlib.suppress(psutil.NoSuchProcess):
                self._daemons[name] = psutil.Process(pid)
        return answer["address"]

    def lost(self) -> str | None:
        """Which part of Ray has died; None: all of it is there."""
        if self._supervisor.poll() is not None:
            return "supervisor"
        return next((name for name, process in self._daemons.items() if not is_running(process)), None)

    def close(self) -> None:
        """End Ray and every process that it has started, and wait for their end."""
        assert self._supervisor.stdin is not None
        with contextlib.suppress(OSError):
            self._supervisor.stdin.close()
        try:
            self._supervisor.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            end_all(psutil.Process(self._supervisor.pid).children(recursive=True))
            self._supervisor.kill()
            self._supervisor.wait()
        shutil.rmtree(self.directory, ignore_errors=True)
        for name, value in self._environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        _follow_environment(False)

    def save_logs(self, target: str) -> None:
        """Copy Ray's logs, which `close` removes, to the directory `target` in place of earlier ones."""
        logs = os.path.join(self.directory, "ray", "session_latest", "logs")
        with contextlib.suppress(OSError, shutil.Error):
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(logs, target, ignore_dangling_symlinks=True)

    def _answer(self) -> dict[str, Any]:
        assert self._supervisor.stdout is not None
        deadline = time.monotonic() + _START_S
        while not select.select([self._supervisor.stdout], [], [], 0.2)[0]:
            if time.monotonic() > deadline:
                return {"error": f"no answer within {_START_S:g} s"}
        line = self._supervisor.stdout.readline()
        return json.loads(line) if line else {"error": "its supervisor ended; the reason is in the output above"}


def is_running(process: psutil.Process) -> bool:
    """Whether a process still runs. A zombie has ended, whoever should reap it."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def end_all(processes: list[psutil.Process]) -> None:
    """Kill the processes that still run."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _set_environment() -> dict[str, str | None]:
    """Set what Ray reads in this process and all that it starts; returns the values that were there before."""
    wanted = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_AUTH_TOKEN_PATH": None,
        "RAY_ADDRESS": None,
        "RAY_USAGE_STATS_ENABLED": os.environ.get("RAY_USAGE_STATS_ENABLED", "0"),
        _LOOPBACK_VARIABLE: "0",
    }
    before = {name: os.environ.get(name) for name in wanted}
    for name, value in wanted.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    return before


def _follow_environment(local: bool) -> None:
    """Make Ray in this process, which has been imported, follow the environment that `_set_environment` has set."""
    from ray._private import ray_constants
    from ray._raylet import AuthenticationTokenLoader, Config

    ray_constants.ENABLE_RAY_CLUSTER = not local
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


# ---------------------------------------------------------------------------------------------------------
# The supervisor


def main() -> None:
    """Start Ray, tell the driver where it is, wait for the driver's end, and end everything."""
    options = json.loads(sys.argv[1])
    directory = options.pop("directory")
    libc = ctypes.CDLL(None)
    # What Ray's processes leave behind when they die becomes a child of this process, and is found.
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # A process that the driver has forked may hold the pipe open; its death is noticed all the same.
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    try:
        _tell(_start_ray(os.path.join(directory, "ray"), options))
        _wait_for_the_driver()
    finally:
        _end_descendants()
        shutil.rmtree(directory, ignore_errors=True)
        os._exit(0)  # Ray's own shutdown could wait for processes that are gone


def _start_ray(directory: str, options: dict[str, Any]) -> dict[str, Any]:
    import ray

    try:
        ray.init(
            address="local",
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            _temp_dir=directory,
            **options,
        )
    except Exception as error:
        return {"error": " ".join(str(error).split())[:1000]}
    daemons = {child.name(): child.pid for child in psutil.Process().children()}
    wanted = {name: pid for name, pid in daemons.items() if name in ("gcs_server", "raylet")}
    return {"address": ray.get_runtime_context().gcs_address, "daemons": wanted}


def _tell(answer: dict[str, Any]) -> None:
    os.write(1, json.dumps(answer).encode() + b"\n")


def _wait_for_the_driver() -> None:
    while os.read(0, 1024):
        pass


def _end_descendants() -> None:
    for _ in range(100):  # a process that is being killed may just have started another
        children = [child for child in psutil.Process().children(recursive=True) if is_running(child)]
        if not children:
            return
        end_all(children)
        psutil.wait_procs(children, timeout=0.1)


if __name__ == "__main__":
    main()
