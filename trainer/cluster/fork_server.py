"""The process that forks the members of a `LocalCluster`, and what each member runs.

The driver, the launcher and the members are connected by socket pairs, so each of them notices the end of another.
When the driver ends, for whatever reason, the launcher ends all members and all processes that they have started. A
member ends when its launcher ends.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, NoReturn

import psutil

from trainer.cluster.stacks import own_stacks
from trainer.cluster.supervisor import adopt_orphans, end_all, end_descendants, is_running, signal_on_death_of_parent
from trainer.cluster.worker_setup import prepare_process
from trainer.errors import describe_error
from trainer.process.signals import HANDLED

HOST = "127.0.0.1"
BUILD = 0
"""Number of the answer that says that the object of a member could not be built."""
_CLOSE_S = 20.0
_END_S = 120.0
"""Longest time for the launcher to end a member. The kernel may need long to free the memory of a GPU."""


class ProcessLauncher:
    """A process that forks members: a new interpreter in a session of its own. A context manager.

    Signals to the process group of the driver, such as Ctrl-C, do not reach the launcher and the members.

    Args:
        preload: modules that the launcher imports before it forks the first member. Without them, each member does its
            imports itself, with its own environment.
    """

    def __init__(self, preload: Sequence[str] = ()):
        self._link, its_end = _pair()
        with its_end:
            self._process = self._start(its_end, preload)

    def _start(self, its_end: Connection, preload: Sequence[str]) -> psutil.Process:
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; from trainer.cluster.fork_server import run_launcher; "
            f"run_launcher({its_end.fileno()}, {list(preload)!r})"
        )
        return psutil.Popen(
            [sys.executable, "-c", code], pass_fds=[its_end.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
        )

    def start(self, name: str, env: dict[str, str]) -> Connection:
        """Begin to fork a member. Return the connection that the member serves (see `_Host`).

        Args:
            name: unique name of the member, for `end`.
            env: environment variables to add to the environment of this process.
        """
        link, its_end = _pair()
        with its_end, contextlib.suppress(OSError):  # if the launcher has died, the connection closes
            self._link.send(("start", name, {**os.environ, **env}, os.getcwd()))
            send_handle(self._link, its_end.fileno(), self._process.pid)
        return link

    def end(self, name: str) -> None:
        """Kill a member and all processes that it has started, and wait for their end.

        A launcher that does not answer is ended, with all members.
        """
        with contextlib.suppress(OSError, EOFError):  # the launcher and its members have died
            self._link.send(("end", name))
            if not self._link.poll(_END_S):
                family = [*self._process.children(recursive=True), self._process]
                end_all(family)
                psutil.wait_procs(family, _CLOSE_S)
            self._link.recv()

    @property
    def is_running(self) -> bool:
        return is_running(self._process)

    def close(self) -> None:
        """End the launcher, all members and all processes that they have started, and wait for their end."""
        self._link.close()
        try:
            self._process.wait(_CLOSE_S)
        except psutil.TimeoutExpired:
            end_all([*self._process.children(recursive=True), self._process])
            self._process.wait()

    def __enter__(self) -> ProcessLauncher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ForkServer(ProcessLauncher):
    """A launcher that is a fork of this process and stays in its process group.

    This process must have no threads yet. Members need not import the modules that this process has imported. For
    tests, which start many jobs and kill each with one signal.
    """

    def _start(self, its_end: Connection, preload: Sequence[str]) -> psutil.Process:
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if child == 0:
            self._link.close()
            run_launcher(its_end.fileno(), preload)
        return psutil.Process(child)


def run_launcher(descriptor: int, preload: Sequence[str]) -> NoReturn:
    """Fork members until the driver closes its end of the connection or dies. Then end all members.

    Args:
        descriptor: file descriptor of the connection to the driver.
    """

    def end(*_: object) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end_descendants()
        os._exit(0)

    adopt_orphans()
    for number in HANDLED:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, end)
    signal_on_death_of_parent(signal.SIGTERM)
    try:
        for module in preload:
            importlib.import_module(module)
        _serve_driver(Connection(descriptor))
    except BaseException:
        traceback.print_exc()
    finally:
        end()


def _serve_driver(driver: Connection) -> None:
    members: dict[str, int] = {}
    launcher = os.getpid()
    while True:
        try:
            match driver.recv():
                case "start", name, environment, directory:
                    its_end = recv_handle(driver)
                    members[name] = os.fork()
                    if members[name] == 0:
                        driver.close()
                        _run_member(Connection(its_end), launcher, name, environment, directory)
                    os.close(its_end)
                case "end", name:
                    if name in members:  # else it has been ended before
                        _end_member(members.pop(name))
                    driver.send(None)
        except (EOFError, ConnectionError):
            return


def _end_member(pid: int) -> None:
    member = psutil.Process(pid)
    family = [*member.children(recursive=True), member]
    end_all(family)
    psutil.wait_procs(family)


def _run_member(driver: Connection, launcher: int, name: str, environment: dict[str, str], directory: str) -> NoReturn:
    try:
        with contextlib.suppress(OSError), open("/proc/self/comm", "w") as file:
            file.write(name)  # `top` and `ps -o comm` show its first 15 characters
        signal_on_death_of_parent(signal.SIGKILL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if os.getppid() == launcher:
            os.environ.clear()
            os.environ.update(environment)
            os.chdir(directory)
            if "torch" in sys.modules and "OMP_NUM_THREADS" in environment:  # torch reads it when it is imported
                sys.modules["torch"].set_num_threads(int(environment["OMP_NUM_THREADS"]))
            _Host(driver).run()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


class _Host:
    """Hosts one object. Each of the channels call, aside and pulse has its own thread, and a fourth thread reads.

    The first message is `where`, the second one `(factory, args)`. Each later message is `(number, channel, payload)`,
    and its answer is `(number, has_failed, payload)`. A payload is the pickle of `(method, args, kwargs)`, of a result,
    or of an exception and its traceback as text. The channel pulse is served while the object is built, too.
    """

    def __init__(self, driver: Connection):
        self._driver = driver
        self._is_built = False
        self._sending = threading.Lock()
        self._calls: dict[str, queue.SimpleQueue] = {name: queue.SimpleQueue() for name in ("call", "aside", "pulse")}

    def run(self) -> NoReturn:
        """Build the object, then serve calls. This process ends when the driver closes the connection."""
        self._where = self._driver.recv()
        message = self._driver.recv_bytes()
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._serve, args=("pulse",), daemon=True).start()
        try:
            factory, args = pickle.loads(message)  # imports what they need
            prepare_process(HOST)
            sys.stdout.reconfigure(line_buffering=True)  # this process ends without a flush
            self._object = factory(*args)
        except BaseException as error:
            self._answer(BUILD, True, _packed(error))
            os._exit(1)
        self._is_built = True
        threading.Thread(target=self._serve, args=("aside",), daemon=True).start()
        self._serve("call")

    def _read(self) -> NoReturn:
        try:
            while True:
                number, channel, payload = self._driver.recv()
                self._calls[channel].put((number, payload))
        except (EOFError, OSError):
            os._exit(0)

    def _serve(self, channel: str) -> NoReturn:
        while True:
            number, payload = self._calls[channel].get()
            try:
                method, args, kwargs = pickle.loads(payload)
                target = self if channel == "pulse" else self._object
                answer, has_failed = pickle.dumps(getattr(target, method)(*args, **kwargs)), False
            except BaseException as error:
                answer, has_failed = _packed(error), True
            self._answer(number, has_failed, answer)

    def _answer(self, number: int, has_failed: bool, payload: bytes) -> None:
        with self._sending:
            self._driver.send((number, has_failed, payload))

    def say(self) -> tuple[int, str, bool]:
        """Return the id of this process, the address of its node, and whether its object is built."""
        return os.getpid(), HOST, self._is_built

    def stacks(self) -> str:
        """Return the stacks of the threads of this process."""
        return own_stacks()

    def where(self) -> dict[str, Any]:
        """Return the address of the node, its name and the GPU ids of this process."""
        return self._where


def _packed(error: BaseException) -> bytes:
    trace = traceback.format_exc()
    try:
        packed = pickle.dumps((error, trace))
        pickle.loads(packed)  # fails for some exceptions whose constructor takes other arguments
        return packed
    except Exception:
        return pickle.dumps((RuntimeError(describe_error(error)), trace))


def _pair() -> tuple[Connection, Connection]:
    left, right = socket.socketpair()
    return Connection(left.detach()), Connection(right.detach())
