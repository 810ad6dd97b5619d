"""The process that forks the workers of a `ProcessCluster`, and the code that runs in each worker.

Socket pairs connect the driver, the fork server and the workers, so each of them notices when another exits. When the
driver exits for any reason, the fork server kills all workers and all processes that the workers have started. A worker
exits when its fork server exits.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, NoReturn

import psutil

from trainer.cluster.supervisor import adopt_orphans, end_all, end_descendants, is_running, signal_on_death_of_parent
from trainer.cluster.worker_groups import prepare_process
from trainer.errors import describe_error
from trainer.process import time_limits
from trainer.process.signals import HANDLED, SIGNALS
from trainer.process.startup import importing
from trainer.process.tracing import MAIN, answer_call

HOST = "127.0.0.1"
BUILD = "<build>"
"""The method of a worker's first call, which no object has. Its argument is the pickle of `(factory, args)`."""


class ForkServer(contextlib.AbstractContextManager):
    """A process that forks workers, in its own session: a new interpreter or a fork of this process. A context manager.

    Signals to the process group of the driver, such as Ctrl-C, do not reach the fork server and the workers.

    Args:
        preload: modules to import before the first fork. A worker imports all other modules itself, with its own
            environment.
        env: environment variables that the imports of `preload` read.
        forks_this: fork this process, so that workers share the memory of its modules. It must have no threads but
            those of `trainer`, and have started neither Ray nor CUDA.
    """

    def __init__(self, preload: Sequence[str] = (), env: Mapping[str, str] | None = None, forks_this: bool = False):
        self._lock = threading.Lock()  # a thread may replace an engine while another one starts ranks
        self._connection, remote = Pipe()
        with remote:
            if forks_this:
                self._process = self._fork(remote, preload)
            else:
                self._process = self._start(remote, preload, {**os.environ, **(env or {})})

    def _start(self, remote: Connection, preload: Sequence[str], env: Mapping[str, str]) -> psutil.Process:
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; from trainer.cluster.fork_server import run_fork_server; "
            f"run_fork_server({remote.fileno()}, {list(preload)!r})"
        )
        return psutil.Popen(
            [sys.executable, "-c", code],
            pass_fds=[remote.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env=env,
        )

    def _fork(self, remote: Connection, preload: Sequence[str]) -> psutil.Process:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        gc.freeze()  # collections leave the memory alone that this process shares with its forks
        with SIGNALS.blocked():  # until the fork server has handlers of its own
            if child := os.fork():
                return psutil.Process(child)
            try:
                os.setsid()
                _name_process("fork server")
                # Give up the files, the log and the handlers of the process that this one is a fork of.
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                os.closerange(3, remote.fileno())
                os.closerange(remote.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
                for name in ("", "trainer"):
                    logging.getLogger(name or None).handlers.clear()
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                run_fork_server(remote.fileno(), preload)
            finally:
                os._exit(1)

    def start(self, title: str, env: Mapping[str, str], placement: Mapping[str, Any]) -> Connection:
        """Begin to fork a worker. Return the connection that it serves (see `Host`). Its first message is its pid.

        `ps -o comm` shows `title`. `env` is added to the variables of this process. `placement`, with address and id
        of the node and the GPU ids, is what heartbeats tell.
        """
        connection, remote = Pipe()
        with remote, contextlib.suppress(OSError):  # if the fork server has died, the connection closes
            with self._lock:
                send_handle(self._connection, remote.fileno(), self._process.pid)
            connection.send((title, {**os.environ, **env}, os.getcwd(), sys.path, placement))
        return connection

    @property
    def is_running(self) -> bool:
        """Whether the fork server has not ended. Each call of a worker asks, so one system call has to do."""
        try:
            return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        except ChildProcessError:  # it has been waited for, or another process has started it
            return is_running(self._process)

    def close(self) -> None:
        """Kill the fork server, all workers and all processes that they have started. Wait until they have exited."""
        gc.unfreeze()
        self._connection.close()
        with contextlib.suppress(psutil.NoSuchProcess):
            self._process.terminate()
        try:
            self._process.wait(time_limits.PROCESS_EXIT_S)
        except psutil.TimeoutExpired:
            end_tree(self._process)
            self._process.wait()

    def kill(self) -> None:
        end_tree(self._process)

    def __exit__(self, *_: object) -> None:
        self.close()


def end_tree(process: psutil.Process) -> None:
    """Kill a process and all processes that it has started, and wait until they have exited, reaped or not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        processes = [*process.children(recursive=True), process]
        end_all(processes)
        end = time.monotonic() + time_limits.PROCESS_EXIT_S
        while any(map(is_running, processes)) and time.monotonic() < end:
            time.sleep(0.01)
        psutil.wait_procs(processes, timeout=0)  # reaps those that this process has started


def _name_process(title: str) -> None:
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as file:
        file.write(title)


def run_fork_server(descriptor: int, preload: Sequence[str]) -> NoReturn:
    """Fork a worker for each socket that the driver sends over `descriptor`, until it exits. Then kill all workers."""

    def end(*_: object) -> NoReturn:
        # Not SIG_IGN: Python writes an error if a signal arrives just before that.
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        end_descendants()
        os._exit(0)

    adopt_orphans()
    for number in HANDLED:
        signal.signal(number, end if number == signal.SIGTERM else signal.SIG_IGN)
    signal_on_death_of_parent(signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    try:
        with importing(), contextlib.suppress(Exception):  # a worker will raise it again, in its own words
            for module in preload:
                importlib.import_module(module)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel removes workers that have exited
        gc.freeze()  # collections of the workers leave the shared memory of the modules alone
        driver, fork_server = Connection(descriptor), os.getpid()
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                worker, pid = recv_handle(driver), -1
                try:
                    pid = os.fork()
                except OSError as error:
                    text = f"WARNING: no process can be started ({error.strerror}): free memory, or raise `ulimit -u`"
                    print(text, file=sys.stderr, flush=True)
                if pid == 0:
                    driver.close()
                    _run_worker(Connection(worker), fork_server)
                os.close(worker)  # a worker that has not started has died, as its driver sees it
    except BaseException:
        traceback.print_exc()
    finally:
        end()


def _run_worker(driver: Connection, fork_server: int) -> NoReturn:
    try:
        signal_on_death_of_parent(signal.SIGKILL)
        for number in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        if os.getppid() == fork_server:
            driver.send(os.getpid())
            title, environment, directory, path, placement = driver.recv()
            _name_process(title)
            os.environ.clear()
            os.environ.update(environment)
            os.chdir(directory)
            sys.path[:] = path  # the fork server may be older than what the driver has added
            if "torch" in sys.modules and "OMP_NUM_THREADS" in environment:  # torch reads it only on import
                sys.modules["torch"].set_num_threads(int(environment["OMP_NUM_THREADS"]))
            if (inductor := sys.modules.get("torch._inductor.config")) is not None:  # the same
                inductor.deterministic = environment.get("TORCHINDUCTOR_DETERMINISTIC") == "1"
            prepare_process(HOST)
            sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # there is no flush at the exit
            lock = threading.Lock()

            def answer(*message: Any) -> None:
                with lock:
                    driver.send(message)

            host = Host(answer, placement)
            for channel in ("background", "heartbeat"):
                threading.Thread(target=host.serve, args=(channel,), daemon=True).start()
            threading.Thread(target=_read, args=(driver, host), daemon=True).start()
            host.serve("call")
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _read(driver: Connection, host: Host) -> NoReturn:
    """Read calls, until the driver closes the connection. Then this process exits."""
    try:
        while True:
            number, channel, payload = driver.recv()
            host.calls[channel].put((number, payload))
    except (EOFError, OSError):
        os._exit(0)


class Host:
    """Hosts one object. Each channel of `worker_groups.Backend.begin` has a thread, which calls `serve`.

    `calls` takes the calls of each channel: the ticket, and a payload, the pickle of `(method, args, kwargs)`. The last
    one is None.

    Args:
        answer: called with the ticket of a call, whether it has failed, and the pickle of its result, or of the
            exception with its traceback.
        placement: what heartbeats tell.
    """

    def __init__(self, answer: Callable[[Any, bool, bytes], None], placement: Mapping[str, Any]):
        self._answer = answer
        self._placement = placement
        self.built: Future[Any] = Future()  # the object
        channels = ("call", "background", "heartbeat")
        self.calls: dict[str, queue.SimpleQueue] = {name: queue.SimpleQueue() for name in channels}

    def serve(self, channel: str) -> None:
        """Make the calls of a channel, one after another."""
        while (message := self.calls[channel].get()) is not None:
            ticket, payload = message
            try:
                method, args, kwargs = pickle.loads(payload)
                if method == BUILD:
                    result = None
                    try:
                        with importing():
                            factory, own = pickle.loads(*args)
                        self.built.set_result(self._call(factory, channel, own, {}, method))
                    except BaseException as error:
                        self.built.set_exception(error)
                elif channel == "heartbeat":
                    result = {"pid": os.getpid(), "is_built": self.built.done(), **self._placement}
                else:
                    result = self._call(getattr(self.built.result(), method), channel, args, kwargs, method)
                answer, has_failed = pickle.dumps(result), False
            except BaseException as error:
                answer, has_failed = pack_error(error), True
            self._answer(ticket, has_failed, answer)

    def _call(self, function: Callable[..., Any], channel: str, args: tuple, kwargs: dict[str, Any], name: str) -> Any:
        return answer_call(function, MAIN if channel == "call" else channel, args, kwargs, name)


def pack_error(error: BaseException) -> bytes:
    """Return the pickle of an exception with its traceback; of one that cannot be pickled, that of its text."""
    trace = "".join(traceback.format_exception(error))
    try:
        packed = pickle.dumps((error, trace))
        pickle.loads(packed)  # fails for some exceptions whose constructor takes other arguments
        return packed
    except Exception:
        return pickle.dumps((RuntimeError(describe_error(error)), trace))
