"""The worker groups of a job without Ray: as plain processes of this machine, or as threads of the driver."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import os
import pickle
import secrets
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from typing import Any

import psutil

from trainer.cluster.fork_server import BUILD, HOST, ForkServer, Host, end_tree
from trainer.cluster.resources import FindGpus, check_gpus, gpus_per_engine
from trainer.cluster.worker_groups import Cluster, Timeouts, WorkerGroup, failure_of
from trainer.config import Config
from trainer.errors import RESTART_HINT, UserError, WorkerError
from trainer.files.shared_memory import PrivateDirectory
from trainer.process import time_limits
from trainer.process.network import use_network_of
from trainer.process.signals import SIGNALS
from trainer.process.tracing import WANTED


class LocalCluster(Cluster):
    """What clusters have in common that use this machine alone. `__enter__` sets `_directory`."""

    _directory: PrivateDirectory

    def put(self, value: Any) -> Any:
        return _Stored(pickle.dumps(value, pickle.HIGHEST_PROTOCOL))

    def rendezvous_address(self, group: WorkerGroup) -> str:
        return f"file://{self._directory.path}/store-{secrets.token_hex(8)}"


class ProcessCluster(LocalCluster):
    """Ranks and engines as processes: `with ProcessCluster(cfg, device) as cluster`. Workers must be able to import the
    factories and arguments that they receive.

    Args:
        fork_server: a fork server that outlives the cluster. None: the cluster starts its own.
        rank_server: the same for ranks on CPUs (see `early_fork`), and for engines that preload modules.
    """

    def __init__(
        self, cfg: Config, device: str, fork_server: ForkServer | None = None, rank_server: ForkServer | None = None
    ):
        self.cfg = cfg
        self.device = device
        self._outer_fork_server = fork_server
        self._rank_server = rank_server if device == "cpu" else None
        self._own_fork_server: ForkServer | None = None
        self._groups: list[tuple[WorkerGroup, list[str]]] = []  # each group with the GPUs that only it uses
        self._timeouts = Timeouts(time_limits.HEARTBEAT_S, time_limits.CALL_S, self._failed_process)

    def __enter__(self) -> ProcessCluster:
        self._gpus: list[str] = []
        if self.device == "cuda":
            if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is None:
                import torch

                visible = ",".join(map(str, range(torch.cuda.device_count())))
            self._gpus = [gpu for gpu in visible.split(",") if gpu]
            check_gpus(self.cfg, len(self._gpus))
        SIGNALS.check()
        self._directory = PrivateDirectory(tempfile.gettempdir(), "trainer-local-", 4)
        return self

    def __exit__(self, *_: object) -> None:
        with SIGNALS.deferred():
            for group, _ in list(self._groups):
                self.release(group)
            if self._own_fork_server is not None:
                self._own_fork_server.close()
            self._directory.close()

    @property
    def _fork_server(self) -> ForkServer:
        if self._outer_fork_server is not None:
            return self._outer_fork_server
        if self._own_fork_server is None:
            self._own_fork_server = ForkServer()
        return self._own_fork_server

    def _failed_process(self) -> str | None:
        servers = [self._outer_fork_server, self._rank_server, self._own_fork_server]
        are_running = all(server.is_running for server in servers if server is not None)
        return None if are_running else "the fork server of the job"

    def count_ranks(self) -> int:
        return self.cfg.trainer.num_workers

    def launch_ranks(self, name: str, factory: Any, env: dict[str, str], count: int | None = None) -> WorkerGroup:
        count = count or self.cfg.trainer.num_workers
        args = [(rank, count, self.device) for rank in range(count)]
        gpus = self._allocate_gpus(count)
        server = self._rank_server or self._fork_server
        return self._launch(server, name, factory, args, env, lambda rank: gpus[rank : rank + 1], gpus)

    def launch_engines(
        self, factory: Any, args: Sequence[tuple], env: dict[str, str], find_gpus: FindGpus | None = None
    ) -> WorkerGroup:
        size = gpus_per_engine(self.cfg, self.device)
        preloaded = self._rank_server if self.cfg.engine.preload else None
        server = preloaded or self._fork_server
        if find_gpus is not None:

            def shared(engine: int) -> list[str]:
                return [gpu for rank in find_gpus(engine) for gpu in rank["gpus"]]

            return self._launch(server, "engine", factory, args, env, shared, [])
        gpus = self._allocate_gpus(size * len(args))
        return self._launch(server, "engine", factory, args, env, lambda i: gpus[i * size : (i + 1) * size], gpus)

    def release(self, group: WorkerGroup) -> None:
        entry = next(entry for entry in self._groups if entry[0] is group)
        self._groups.remove(entry)
        group.kill()
        self._gpus += entry[1]

    def _launch(
        self,
        server: ForkServer,
        name: str,
        factory: Any,
        args: Sequence[tuple],
        env: dict[str, str],
        gpus: Callable[[int], list[str]],
        group_gpus: list[str],
    ) -> WorkerGroup:
        self._timeouts.check_cluster()

        def launch(worker: int) -> _Process:
            ids = gpus(worker)
            visible = {"CUDA_VISIBLE_DEVICES": ",".join(ids)} if self.device == "cuda" else {}
            placement = {"host": HOST, "node": "this", "gpus": ids}
            connection = server.start(f"{name} {worker}", {**env, **visible}, placement)
            return _Process(server, connection, factory, args[worker])

        group = WorkerGroup(name, len(args), launch, Processes(), self._timeouts)
        self._groups.append((group, group_gpus))
        return group

    def _allocate_gpus(self, count: int) -> list[str]:
        allocated, self._gpus = self._gpus[:count], self._gpus[count:]
        assert self.device == "cpu" or len(allocated) == count, "release a group before another takes its GPUs"
        return allocated


class _Stored:
    """Its own pickle loads as the value."""

    def __init__(self, data: bytes):
        self._data = data

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        return pickle.loads, (self._data,)


class _Process:
    """The driver's end of a worker (see `fork_server.Host`). The result of a call is a future, never an exception. It
    is `(has_failed, payload)`, or None if the worker has exited."""

    def __init__(self, server: ForkServer, connection: Connection, factory: Any, args: tuple):
        self._server = server
        self._connection = connection
        self._pid: Future[int | None] = Future()  # None: it has not started, and will not
        self._lock = threading.Lock()
        self._send_lock = threading.Lock()
        self._calls: dict[int, Future] = {}
        self._numbers = itertools.count()
        self._has_exited = False
        threading.Thread(target=self._read, daemon=True).start()
        self.begin("call", BUILD, (pickle.dumps((factory, args)),), {})

    def begin(self, channel: str, method: str, args: tuple, kwargs: dict[str, Any]) -> Future:
        payload = pickle.dumps((method, args, kwargs), pickle.HIGHEST_PROTOCOL)
        call: Future = Future()
        with self._lock:
            if self._has_exited:
                call.set_result(None)
                return call
            number = next(self._numbers)
            self._calls[number] = call
        with self._send_lock, contextlib.suppress(OSError):  # the worker has exited: `_read` reports it
            self._connection.send((number, channel, payload))
        return call

    def kill(self) -> None:
        """Kill the process and all processes that it has started. Kill a fork server that has not started it."""
        try:
            pid = self._pid.result(time_limits.WORKER_EXIT_S)
        except TimeoutError:
            self._server.kill()
        else:
            with contextlib.suppress(psutil.NoSuchProcess):
                if pid is not None:
                    end_tree(psutil.Process(pid))

    def _read(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            self._pid.set_result(self._connection.recv())
            while True:
                number, has_failed, payload = self._connection.recv()
                with self._lock:
                    call = self._calls.pop(number)
                call.set_result((has_failed, payload))
        if not self._pid.done():
            self._pid.set_result(None)
        with self._lock:
            self._has_exited = True
            calls = list(self._calls.values())
        for call in calls:
            call.set_result(None)
        with self._send_lock:
            self._connection.close()


class Processes:
    """Implements `trainer.cluster.worker_groups.Backend`. A ticket is a future."""

    def begin(self, process: _Process, channel: str, method: str, args: tuple, kwargs: dict[str, Any]) -> Future:
        return process.begin(channel, method, args, kwargs)

    def wait(self, tickets: list[Future], timeout_s: float) -> list[Future]:
        done = concurrent.futures.wait(tickets, timeout_s, concurrent.futures.FIRST_COMPLETED).done
        return list(done)

    def get(self, ticket: Future, name: str) -> Any:
        if ticket.result() is None:
            text = f"{name} died: its process was killed or crashed, perhaps because memory ran out"
            raise WorkerError(text, RESTART_HINT, "killed")
        has_failed, payload = ticket.result()
        value = pickle.loads(payload)
        if has_failed:
            cause, trace = value
            raise failure_of(cause, name, trace)
        return value

    def has_started(self, process: _Process) -> bool:
        return True

    def kill(self, process: _Process, process_id: tuple[int, str] | None) -> None:
        process.kill()


class ThreadCluster(LocalCluster):
    """One rank and one engine as threads: `with ThreadCluster(cfg, device) as cluster`.

    What a worker gets and returns is copied, as between processes, so a run computes the same bits. No call has a time
    limit, because a debugger may hold it. The environment of this process is as before at the end.

    Raises:
        UserError: the run uses a GPU, which ranks and engines of one process cannot share.
    """

    def __init__(self, cfg: Config, device: str):
        if device != "cpu":
            raise UserError("trainer.ray_address=this_process: runs on the CPU; set trainer.device=cpu")
        self.cfg = cfg
        self.device = device
        self._exclusive = threading.Lock()

    def __enter__(self) -> ThreadCluster:
        self._environment = dict(os.environ)
        self._directory = PrivateDirectory(tempfile.gettempdir(), "trainer-local-", 4)
        use_network_of(HOST, os.environ)
        return self

    def __exit__(self, *_: object) -> None:
        _leave_process_group()
        self._directory.close()
        os.environ.clear()
        os.environ.update(self._environment)

    def count_ranks(self) -> int:
        return 1

    def launch_ranks(self, name: str, factory: Any, env: dict[str, str], count: int | None = None) -> WorkerGroup:
        _leave_process_group()  # of ranks that have failed
        return self._launch(name, factory, [(0, 1, self.device)], env)

    def launch_engines(
        self, factory: Any, args: Sequence[tuple], env: dict[str, str], find_gpus: FindGpus | None = None
    ) -> WorkerGroup:
        return self._launch("engine", factory, args, env)

    def release(self, group: WorkerGroup) -> None:
        group.kill()  # the threads end once they have made their calls

    def _launch(self, name: str, factory: Any, args: Sequence[tuple], env: dict[str, str]) -> WorkerGroup:
        os.environ.update(env)
        forever = Timeouts(float("inf"), float("inf"))

        def launch(worker: int) -> WorkerThread:
            return WorkerThread(f"{name} {worker}", factory, args[worker], self._exclusive)

        return WorkerGroup(name, len(args), launch, Processes(), forever)


class WorkerThread(Host):
    """A worker whose channels have threads of this process. The result of a call is as that of a `_Process`.

    `exclusive` is held while an object is built or called: libraries that build models replace functions of torch
    meanwhile.
    """

    def __init__(self, name: str, factory: Callable[..., Any], args: tuple, exclusive: AbstractContextManager):
        super().__init__(lambda call, *outcome: call.set_result(outcome), {"host": HOST, "node": "this", "gpus": []})
        self._exclusive = exclusive
        for channel in self.calls:
            threading.Thread(target=self.serve, args=(channel,), name=f"{name} {channel}", daemon=True).start()
        self.begin("call", BUILD, (pickle.dumps((factory, args)),), {})

    def begin(self, channel: str, method: str, args: tuple, kwargs: dict[str, Any]) -> Future:
        call: Future = Future()
        self.calls[channel].put((call, pickle.dumps((method, args, kwargs), pickle.HIGHEST_PROTOCOL)))
        return call

    def kill(self) -> None:
        """End the threads after the calls that have begun."""
        for calls in self.calls.values():
            calls.put(None)

    def serve(self, channel: str) -> None:
        import torch

        torch.set_num_threads(1)  # a thread has a setting of its own
        super().serve(channel)

    def _call(self, function: Callable[..., Any], channel: str, args: tuple, kwargs: dict[str, Any], name: str) -> Any:
        kwargs.pop(WANTED, None)  # the spans of this process are those of the driver
        with self._exclusive if channel == "call" else contextlib.nullcontext():
            return function(*args, **kwargs)


def _leave_process_group() -> None:
    import torch

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
