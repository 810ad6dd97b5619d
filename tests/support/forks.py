"""Commands that start in a moment: each runs in a fork of a process that has imported torch, transformers and us.

`python -m tests.support.forks DESCRIPTOR PATH` is that process. It takes one command from each connection to a socket,
with the descriptors of its output. A keeper, which is the parent of the command, answers with the id of the command's
process and, when nothing is left of all that the command has started, with its status.

A forked job runs its ranks and engines without Ray, as forks of itself in its own process group, which one signal ends.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import gc
import importlib
import json
import os
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

import psutil

_ROOT = Path(__file__).resolve().parents[2]
_PRELOADED = (
    "hydra",
    "matplotlib.backends.backend_agg",
    "tenacity",
    "trainer.checkpoint.__main__",
    "trainer.reports.compare",
    "trainer.generation.transformers_engine",
    "trainer.jobs",
    "trainer.objectives.policy_gradient",
    "trainer.tasks.rl",
    "trainer.tasks.supervised",
    "trainer.models.tiny",
    "trainer.workers.rank",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen3.modeling_qwen3",
)
_VLLM = (
    "vllm",
    "vllm.entrypoints.llm",
    "vllm.v1.worker.cpu_worker",
    "trainer.generation.vllm_engine",
    "tests.support.vllm_registry",
)
"""Imported too, before the first command that asks for vLLM: each engine would take seconds to import it."""
_HELLO = b"hello"
_GRACE_PERIOD_S = 20.0
"""Default of the longest time that processes of a command may outlive it."""

# ----------------------------------------------------------------------------------------------------------
# In the server, its keepers and its commands


def serve(listener: socket.socket) -> None:
    """Take commands until the process that has started this one, which holds its stdin, and all others have ended."""
    from trainer.run import run_metadata

    for module in _PRELOADED:
        importlib.import_module(module)
    run_metadata.versions()  # each job would read them again
    assert _threads() == 1, "a fork would lack the threads of an import"
    # pyarrow imports it for the first column that it makes. Its threads are jemalloc's, which forks do without.
    importlib.import_module("pandas")
    # Its threads serve a process group that has ended.
    importlib.import_module("tests.support.warm_rank")
    gc.freeze()  # collections of the forks leave the shared memory of the modules alone
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel removes keepers that have ended
    inputs: list[Any] = [listener, sys.stdin]
    while len(inputs) > 1:
        for ready in select.select(inputs, [], [])[0]:
            if ready is not listener:
                inputs.remove(ready)
            elif (user := _take(listener)) is not None:
                inputs.append(user)


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def import_engine(_: str, *arguments: str) -> None:
    """Import vLLM, in the server, if it is the engine of a job with these arguments."""
    if "rollout=vllm" not in arguments or "vllm" in sys.modules:
        return
    from trainer.config.engines import ENGINES

    before, threads = dict(os.environ), _threads()
    os.environ.update(ENGINES["vllm"].environment_on("cpu"))
    for module in _VLLM:
        importlib.import_module(module)
    os.environ.clear()
    os.environ.update(before)
    assert _threads() == threads, "a fork would lack the threads of an import"


def _take(listener: socket.socket) -> socket.socket | None:
    """Start a command. Or return the connection of a process that says that it will give some."""
    link, _ = listener.accept()
    data, output, *_ = socket.recv_fds(link, 1 << 20, 2)
    if not data:  # who connected has ended
        link.close()
        return None
    if data == _HELLO:
        link.sendall(_HELLO)
        return link
    spec = json.loads(data)
    if spec["prepare"]:
        _imported(spec["prepare"])(*spec["arguments"])
    if os.fork() == 0:
        try:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _keep(link, spec, output)
        finally:  # who waits for the command may have ended: what the server does at its end is not for a fork of it
            os._exit(1)
    for descriptor in output:
        os.close(descriptor)
    link.close()
    return None


def _keep(link: socket.socket, spec: dict[str, Any], output: list[int]) -> NoReturn:
    """Run one command and watch it, as its keeper. Kill it when the process that waits for it ends."""
    from trainer.cluster.supervisor import adopt_orphans, end_descendants

    os.setsid()
    adopt_orphans()
    command = os.fork()
    if command == 0:
        link.close()
        _run(spec, output)
    os.setpgid(command, command)  # it does so itself, perhaps later
    for descriptor in output:
        os.close(descriptor)
    link.sendall(b"%d\n" % command)
    exit_event = os.pidfd_open(command)
    if exit_event not in select.select([exit_event, link], [], [])[0]:
        end_descendants()
        os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(command, 0)[1])
    left = _wait_for_children(spec["patience_s"])
    end_descendants()
    link.sendall(json.dumps({"status": status, "left": left}).encode() + b"\n")
    os._exit(0)


def _wait_for_children(patience_s: float) -> list[str]:
    """Wait until nothing is left of what the command has started; return the command lines of what stays."""
    end = time.monotonic() + patience_s
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < end:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.002)
        return [" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)]
    return []


def _run(spec: dict[str, Any], output: list[int]) -> NoReturn:
    status = 1
    try:
        os.setpgid(0, 0)
        for number, descriptor in enumerate(output, start=1):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.environ.clear()
        os.environ.update(spec["env"])
        if (config := sys.modules.get("fsspec.config")) is not None:
            config.set_conf_env(config.conf)  # it was read under the environment of the server
        os.chdir(spec["cwd"])
        sys.path[0] = spec["cwd"]
        _imported(spec["function"])(*spec["arguments"])
        status = 0
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _imported(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


@functools.cache
def fork_clusters() -> None:
    """Let the ranks and engines of this process be forks of it. Call it while this process has no threads."""
    from tests.support.inheriting_fork_server import InheritingForkServer
    from trainer.cluster import early_start, process_cluster

    process_cluster.ProcessCluster = functools.partial(
        process_cluster.ProcessCluster, fork_server=InheritingForkServer()
    )
    early_start.early_fork = lambda *_: contextlib.nullcontext()


def run_module(module: str, *arguments: str) -> None:
    """Do what `python -m module arguments` does."""
    from trainer.__main__ import JOBS

    if [module, *arguments[:1]] in [["trainer", job] for job in JOBS]:
        fork_clusters()
    sys.argv = [module, *arguments]
    sys.orig_argv = [sys.executable, "-m", *sys.argv]
    for name in (module, f"{module}.__main__"):
        if not hasattr(sys.modules.get(name), "__path__"):
            sys.modules.pop(name, None)  # or runpy would warn that it is imported already
    runpy.run_module(module, run_name="__main__", alter_sys=True)


# ----------------------------------------------------------------------------------------------------------
# Outside


class ForkedCommand:
    """A command that has been started; what `subprocess.Popen` is to other commands.

    `wait` and `poll` fail if the command has left processes behind.
    """

    def __init__(self, link: socket.socket, stdout: IO[str] | None):
        self._link = link
        self._answers = link.makefile("r")
        self.pid = int(self._answers.readline())
        self.stdout = stdout
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._link], [], [], 0)[0]:
            answer = json.loads(self._answers.readline())
            self._link.close()
            self.returncode = answer["status"]
            assert answer["left"] == [], f"left running: {answer['left']}"
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None and not select.select([self._link], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("a forked command", timeout or 0)
        status = self.poll()
        assert status is not None
        return status

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """Return the rest of its output, which must be short enough for a pipe, when it has ended."""
        self.wait(timeout)
        assert self.stdout is not None
        return self.stdout.read(), None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def forget(self) -> None:
        """Wait for it no longer. The server kills it, as it does when this process ends."""
        self._answers.close()
        self._link.close()

    def kill_group(self) -> None:
        """Kill the command with its ranks, engines and their launcher."""
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.killpg(self.pid, signal.SIGKILL)


class CommandForkServer:
    """The process whose forks run the commands. All processes of a test run share one, which ends with the last."""

    def __init__(self) -> None:
        run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
        directory = os.path.join(tempfile.gettempdir(), f"forks-{run}") if run else tempfile.mkdtemp(prefix="forks")
        self._path = os.path.join(directory, "socket")
        self._link = socket.socket(socket.AF_UNIX)  # while it is open, the server stays
        while not self._started(directory) and not self._joined():
            time.sleep(0.02)  # another process has just begun to start the server, or the server has just ended
        atexit.register(self._link.close)

    def _started(self, directory: str) -> bool:
        """Start the server; false if another process has done so."""
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        env.pop("TRAINER_TEST_MARKER", None)  # it belongs to the test that happens to be first
        with socket.socket(socket.AF_UNIX) as listener:
            try:
                os.makedirs(directory, mode=0o700, exist_ok=True)
                listener.bind(self._path)
            except OSError as error:
                if error.errno in (errno.EADDRINUSE, errno.ENOENT):  # the directory has just been deleted
                    return False
                raise
            listener.listen(64)
            stdin, held = socket.socketpair()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.forks", str(listener.fileno()), self._path],
                stdin=stdin,
                pass_fds=[listener.fileno()],
                env=env,
                cwd=_ROOT,
            )
            stdin.close()
            self._link = held
        return True

    def _joined(self) -> bool:
        """Join the server of another process; false if it has ended."""
        with contextlib.suppress(OSError):
            self._link = socket.socket(socket.AF_UNIX)
            self._link.connect(self._path)
            self._link.sendall(_HELLO)
            return self._link.recv(len(_HELLO)) == _HELLO
        return False

    def start(
        self,
        function: str,
        *arguments: Any,
        cwd: Path,
        env: Mapping[str, str],
        stdout: int | IO[Any] = subprocess.PIPE,
        stderr: int | IO[Any] = subprocess.STDOUT,
        prepare: str = "",
        patience_s: float = _GRACE_PERIOD_S,
    ) -> ForkedCommand:
        """Call a function in a process of its own.

        Args:
            function: import path `module:function`.
            arguments: JSON-able.
            prepare: import path of a function that the server itself calls before, with the same arguments.
            patience_s: longest time that processes of the command may outlive it.
        """
        spec = {"function": function, "arguments": arguments, "prepare": prepare, "patience_s": patience_s}
        spec |= {"cwd": str(cwd), "env": dict(env)}
        reader = None
        with contextlib.ExitStack() as stack:
            if stdout == subprocess.PIPE:
                ours, stdout = os.pipe()
                stack.callback(os.close, stdout)
                reader = os.fdopen(ours, "r")
            out = stdout if isinstance(stdout, int) else stdout.fileno()
            err = out if stderr == subprocess.STDOUT else stderr if isinstance(stderr, int) else stderr.fileno()
            link = socket.socket(socket.AF_UNIX)
            link.connect(self._path)
            socket.send_fds(link, [json.dumps(spec).encode()], [out, err])
        return ForkedCommand(link, reader)

    def write_python(self, directory: Path) -> None:
        """Write programs `python` and `trainer`, which let this server do what `python -m MODULE ARGUMENTS` does."""
        client = [sys.executable, "-S", "-E", str(_ROOT / "tests/support/forked_python.py"), self._path]
        for name, words in (("python", client), ("trainer", [*client, "-m", "trainer"])):
            program = directory / name
            program.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
            program.chmod(0o755)


@functools.cache
def fork_server() -> CommandForkServer:
    return CommandForkServer()


def run_forked(
    module: str, arguments: Sequence[str], cwd: Path, env: Mapping[str, str], timeout: float
) -> subprocess.CompletedProcess:
    """Run `python -m module arguments` to its end; returns the completed process with its output as text."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        command = fork_server().start(
            *("tests.support.forks:run_module", module, *arguments),
            cwd=cwd,
            env=env,
            stdout=out,
            stderr=err,
            prepare="tests.support.forks:import_engine",
        )
        status = command.wait(timeout)
        texts = [(file.seek(0), file.read())[1] for file in (out, err)]
    return subprocess.CompletedProcess([module, *arguments], status, *texts)


if __name__ == "__main__":
    try:
        serve(socket.socket(fileno=int(sys.argv[1])))
    finally:
        os.unlink(sys.argv[2])  # before the listener closes: who is refused may start another one
        with contextlib.suppress(OSError):
            os.rmdir(os.path.dirname(sys.argv[2]))
