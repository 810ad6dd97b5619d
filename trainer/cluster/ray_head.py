"""A Ray cluster on this machine for one run. Other users cannot use it, and it exits with the run.

A supervisor process (`trainer.cluster.supervisor`) starts Ray and waits. It has its own session, so signals to the
process group of the driver do not reach Ray. The supervisor reads a pipe. When the driver closes the pipe, or is
killed, the supervisor kills all processes of Ray, removes Ray's files and exits.

Ray executes the code that its clients send. So Ray listens on the loopback interface only, every call must carry a
random token of this run, and Ray's sockets and logs are in a directory that only this user can enter.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping

import psutil

from trainer.cluster import supervisor
from trainer.cluster.resources import slots_needed
from trainer.cluster.supervisor import end_all, is_running
from trainer.config import Config
from trainer.errors import UserError, WorkerError
from trainer.files.shared_memory import PrivateDirectory
from trainer.process import time_limits
from trainer.process.signals import SIGNALS

CPU_OBJECT_STORE_BYTES = 512 * 2**20  # batches on CPU are small, and Ray's default is a third of the memory
_LOOPBACK_VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # "0": Ray uses the loopback address for this node

_SOCKET = "trainer-ray-01234567/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
_SOCKET_BYTES = 107  # Linux's limit for the path of a socket


class RayHead:
    """Begins to start the cluster, with files in `tmpdir` (see `check_tmpdir`) and an object store of Ray's default
    size if none is given. `connect` waits until it runs, and `close` ends it at any time."""

    def __init__(self, tmpdir: str, num_cpus: int, object_store_bytes: int | None):
        self._private = PrivateDirectory(tmpdir, "trainer-ray-", 4)
        self.directory = self._private.path
        self._environment = _set_environment()
        options = {"num_cpus": num_cpus, "directory": self.directory}
        if object_store_bytes is not None:
            options["object_store_memory"] = object_store_bytes
        self._supervisor = subprocess.Popen(
            [sys.executable, "-P", supervisor.__file__, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._daemons: dict[str, psutil.Process] = {}
        self._is_closing = self._is_closed = False

    @classmethod
    def of_job(cls, cfg: Config, device: str) -> RayHead:
        """Begin to start the cluster of a job. Raises UserError: Ray cannot start on this machine."""
        slots = max(os.cpu_count() or 1, slots_needed(cfg))
        return cls(check_tmpdir(), slots, CPU_OBJECT_STORE_BYTES if device == "cpu" else None)

    def connect(self) -> str:
        """Wait until Ray runs. Return the address for the driver. Raises WorkerError: Ray does not start, and why."""
        from ray._private import worker

        _reload_environment(True)
        # Keep Ray from printing long texts when a process dies. The job prints one message and keeps the logs. Also,
        # `ray.shutdown` would wait for the thread that prints them. If the GCS has died meanwhile, Ray would end this
        # process first.
        worker.listen_error_messages = lambda *_: None
        output = self._supervisor.stdout
        assert output is not None
        deadline = time.monotonic() + time_limits.RAY_START_S
        while not select.select([output], [], [], 0.2)[0]:
            SIGNALS.check()
            if time.monotonic() > deadline:
                raise WorkerError(f"Ray does not start on this machine: no answer within {time_limits.RAY_START_S:g} s")
        line = output.readline()
        answer = json.loads(line) if line else {"error": "its supervisor ended; the reason is in the output above"}
        if "error" in answer:
            raise WorkerError(f"Ray does not start on this machine: {answer['error']}")
        for name, pid in answer["daemons"].items():
            with contextlib.suppress(psutil.NoSuchProcess):
                self._daemons[name] = psutil.Process(pid)

        def watch_supervisor() -> None:
            """Exit with a message when the supervisor dies. The kernel kills Ray together with the supervisor. Then
            Ray's C++ code ends this process within milliseconds, without a message."""
            output.read()
            if not self._is_closing:
                os.write(2, b"error: Ray's supervisor died, and the job with it; restart it with the same command\n")
                os._exit(1)

        with SIGNALS.blocked():
            threading.Thread(target=watch_supervisor, name="supervisor watch", daemon=True).start()
        return answer["address"]

    def failed_process(self) -> str | None:
        if self._supervisor.poll() is not None:
            return "supervisor"
        return next((name for name, process in self._daemons.items() if not is_running(process)), None)

    def close(self) -> None:
        """Kill Ray and all processes that it has started, and wait until they have exited."""
        assert self._supervisor.stdin is not None
        if self._is_closed:
            return
        self._is_closing = True
        with contextlib.suppress(OSError):
            self._supervisor.stdin.write(supervisor.END)
            self._supervisor.stdin.close()
        if not self._daemons:
            self._supervisor.send_signal(supervisor.END_SIGNAL)  # it is still starting Ray and does not read the pipe
        try:
            self._supervisor.wait(time_limits.PROCESS_EXIT_S)
        except subprocess.TimeoutExpired:
            end_all(psutil.Process(self._supervisor.pid).children(recursive=True))
            self._supervisor.kill()
            self._supervisor.wait()
        self._private.close()
        _set(self._environment)
        if "ray" in sys.modules:
            _reload_environment(False)
        self._is_closed = True

    def save_logs(self, target: str) -> None:
        """Copy Ray's logs, which `close` removes, to the directory `target`, in place of earlier ones."""
        logs = os.path.join(self.directory, "ray", "session_latest", "logs")
        with contextlib.suppress(OSError, shutil.Error):
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(logs, target, ignore_dangling_symlinks=True)


def _set_environment() -> dict[str, str | None]:
    """Set the environment variables that Ray reads, here and in child processes. Return the previous values."""
    variables = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_AUTH_TOKEN_PATH": None,
        "RAY_ADDRESS": None,
        "RAY_USAGE_STATS_ENABLED": os.environ.get("RAY_USAGE_STATS_ENABLED", "0"),
        "RAY_prestart_worker_first_driver": "0",  # actors have environments of their own, and would not use them
        _LOOPBACK_VARIABLE: "0",
    }
    previous = {name: os.environ.get(name) for name in variables}
    _set(variables)
    return previous


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _reload_environment(local: bool) -> None:
    """Make the Ray module, which this process may have imported before, read the environment again."""
    from ray._private import ray_constants
    from ray._raylet import AuthenticationTokenLoader, Config

    ray_constants.ENABLE_RAY_CLUSTER = not local
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def check_tmpdir() -> str:
    """Return the directory for temporary files. Raises UserError: not writable, or its path is too long for a
    socket."""
    name = next((name for name in ("RAY_TMPDIR", "TMPDIR") if name in os.environ), "TMPDIR")
    directory = os.environ.get(name, "/tmp")
    remedy = "set RAY_TMPDIR to another directory, for example one in /tmp"
    length = len(os.fsencode(os.path.join(directory, _SOCKET)))
    if length > _SOCKET_BYTES:
        raise UserError(
            f"{name}={directory}: the path is {length - _SOCKET_BYTES} characters too long for Ray's sockets; {remedy}"
        )
    try:
        os.makedirs(directory, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise UserError(
            f"{name}={directory}: Ray writes its sockets and logs there, and the directory is not writable "
            f"({error.strerror}); {remedy}"
        ) from error
    return directory
