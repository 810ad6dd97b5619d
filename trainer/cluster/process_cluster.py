"""The groups of a job as plain processes of this machine, without Ray. For tests and for debugging."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import os
import pickle
import secrets
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from trainer.cluster.fork_server import BUILD, HOST, ProcessLauncher
from trainer.cluster.gpu_health import GpuHealthCheck
from trainer.cluster.resources import FindHome, check_gpus
from trainer.cluster.stacks import stacks_from_outside
from trainer.cluster.timeouts import patience_of
from trainer.cluster.worker_groups import WorkerGroup, stacks_of
from trainer.cluster.worker_setup import failure_of
from trainer.config import Config
from trainer.errors import RESTART_HINT, WorkerError
from trainer.files.shared_memory import PrivateDirectory
from trainer.process.signals import SIGNALS
from trainer.process.xid import gpu_lines

_OF_HOST = {"pulse": "say", "where": "where", "stacks": "stacks"}
"""Channels that the host itself serves, with its methods."""


class LocalCluster:
    """Implements `trainer.cluster.worker_groups.Cluster`: `with LocalCluster(cfg, device) as cluster`.

    Members must be able to import the factories and arguments that they get.

    Args:
        device: `cuda` or `cpu`.
        launcher: a launcher that exists longer than the cluster. None: the cluster starts its own.
    """

    object_store_bytes = 0

    def __init__(self, cfg: Config, device: str, launcher: ProcessLauncher | None = None):
        self.cfg = cfg
        self.device = device
        self._shared_launcher = launcher
        self._groups: list[tuple[WorkerGroup, list[str]]] = []  # each group with the GPUs that belong to it alone
        self._patience = patience_of(cfg.trainer, self._lost)
        self.examine = GpuHealthCheck(lambda seconds: {HOST: gpu_lines(seconds)}, lambda node, cause: None).examine

    def __enter__(self) -> LocalCluster:
        self._gpus = _visible_gpus() if self.device == "cuda" else []
        if self.device == "cuda":
            check_gpus(self.cfg, len(self._gpus))
        SIGNALS.check()
        self._directory = PrivateDirectory(tempfile.gettempdir(), "trainer-local-", 4)
        self._launcher = self._shared_launcher or ProcessLauncher()
        return self

    def __exit__(self, *_: object) -> None:
        with SIGNALS.held():
            for group, _ in list(self._groups):
                self.release(group)
            if self._shared_launcher is None:
                self._launcher.close()
            self._directory.close()

    def _lost(self) -> str | None:
        return None if self._launcher.is_running else "the launcher of its processes"

    def count_ranks(self) -> int:
        """Return `trainer.num_workers`."""
        return self.cfg.trainer.num_workers

    def launch_ranks(self, name: str, factory: Any, env: dict[str, str], count: int | None = None) -> WorkerGroup:
        """Start `count` processes that host `factory(rank, world_size, device)`, each with one GPU."""
        count = count or self.cfg.trainer.num_workers
        args = [(rank, count, self.device) for rank in range(count)]
        gpus = self._take_gpus(count)
        return self._launch(name, factory, args, env, lambda rank: gpus[rank : rank + 1], gpus)

    def launch_engines(
        self, factory: Any, args: tuple, env: dict[str, str], home: FindHome | None = None
    ) -> WorkerGroup:
        """Start `rollout.num_engines` processes that host `factory(*args)` (see `worker_groups.Cluster`)."""
        size, count = self.cfg.rollout.tensor_parallel_size, self.cfg.rollout.num_engines
        if home is not None:
            return self._launch("engine", factory, [args] * count, env, lambda engine: _gpus_of(home(engine)), [])
        own = self._take_gpus(size * count)
        return self._launch("engine", factory, [args] * count, env, lambda i: own[i * size : (i + 1) * size], own)

    def has_room(self, group: WorkerGroup) -> bool:
        """Return True: processes of one machine keep their place."""
        return True

    def put(self, value: Any) -> Any:
        """Return a reference to a copy of `value`, which is pickled once. Members get the value."""
        return _Stored(pickle.dumps(value, pickle.HIGHEST_PROTOCOL))

    def meeting_place(self, group: WorkerGroup, port: int = 0) -> str:
        """Return the address at which the members of a process group meet. The first rank of `group` is its first rank.

        Args:
            port: port of the meeting. 0: they meet at a file.
        """
        if not port:
            return f"file://{self._directory.path}/store-{secrets.token_hex(8)}"
        return group.call_one(0, "find_address", HOST, port)

    def release(self, group: WorkerGroup) -> None:
        """End the processes of the group, wait for their end, and free their GPUs."""
        entry = next(entry for entry in self._groups if entry[0] is group)
        self._groups.remove(entry)
        group.kill()
        self._gpus += entry[1]

    def stacks(self) -> dict[str, str]:
        """Return the stacks of all processes, by name. Any thread may ask."""
        return stacks_of([group for group, _ in self._groups])

    def _launch(
        self,
        name: str,
        factory: Any,
        args: Sequence[tuple],
        env: dict[str, str],
        gpus: Callable[[int], list[str]],
        own: list[str],
    ) -> WorkerGroup:
        self._patience.check_cluster()

        def launch(member: int) -> _Process:
            ids = gpus(member)
            visible = {"CUDA_VISIBLE_DEVICES": ",".join(ids)} if self.device == "cuda" else {}
            place = {"host": HOST, "node": "this", "gpus": ids}
            return _Process(self._launcher, f"{name} {member}", {**env, **visible}, factory, args[member], place)

        group = WorkerGroup(name, len(args), launch, _Processes(), self._patience)
        self._groups.append((group, own))
        return group

    def _take_gpus(self, count: int) -> list[str]:
        taken, self._gpus = self._gpus[:count], self._gpus[count:]
        return taken


class _Stored:
    """Holds the pickle of a value. Its own pickle loads as that value."""

    def __init__(self, data: bytes):
        self._data = data

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        return pickle.loads, (self._data,)


class _Process:
    """The connection of the driver to a member (see `trainer.cluster.fork_server._Host`)."""

    def __init__(
        self,
        launcher: ProcessLauncher,
        title: str,
        env: dict[str, str],
        factory: Any,
        args: tuple,
        place: dict[str, Any],
    ):
        self._launcher = launcher
        self._name = f"{title} {secrets.token_hex(4)}"  # after a restart, another member has the same title
        self._link = launcher.start(self._name, env)
        message = pickle.dumps((factory, args))
        with contextlib.suppress(OSError):  # the launcher has died: `_read` reports it
            self._link.send(place)
            self._link.send_bytes(message)
        self._sending = threading.Lock()
        self._state = threading.Lock()
        self._calls: dict[int, Future] = {}
        self._numbers = itertools.count(BUILD + 1)
        self._end: tuple[str, bytes] | None = None
        """The outcome of all calls after the member has ended."""
        threading.Thread(target=self._read, daemon=True).start()

    def begin(self, channel: str, method: str, args: tuple, kwargs: dict[str, Any]) -> Future:
        """Begin a call. The result of its future is `(outcome, payload)`, never an exception."""
        payload = pickle.dumps((method, args, kwargs), pickle.HIGHEST_PROTOCOL)
        call: Future = Future()
        with self._state:
            if self._end is not None:
                call.set_result(self._end)
                return call
            number = next(self._numbers)
            self._calls[number] = call
        with self._sending, contextlib.suppress(OSError):  # the member has ended: `_read` reports it
            self._link.send((number, channel, payload))
        return call

    def kill(self) -> None:
        """End the process and all processes that it has started."""
        self._launcher.end(self._name)

    def _read(self) -> None:
        end = ("died", b"")
        with contextlib.suppress(EOFError, OSError):
            while True:
                number, has_failed, payload = self._link.recv()
                if number == BUILD:
                    end = ("failed", payload)
                else:
                    with self._state:
                        call = self._calls.pop(number)
                    call.set_result(("failed" if has_failed else "done", payload))
        with self._state:
            self._end = end
            calls = list(self._calls.values())
            self._calls.clear()
        for call in calls:
            call.set_result(end)
        with self._sending:
            self._link.close()


class _Processes:
    """Implements `trainer.cluster.worker_groups.Backend`. A ticket is a future."""

    def begin(self, process: _Process, channel: str, method: str, args: tuple, kwargs: dict[str, Any]) -> Future:
        if channel in _OF_HOST:
            return process.begin("pulse", _OF_HOST[channel], (), {})
        return process.begin(channel, method, args, kwargs)

    def wait(self, tickets: list[Future], timeout_s: float) -> list[Future]:
        done = concurrent.futures.wait(tickets, timeout_s, concurrent.futures.FIRST_COMPLETED).done
        return list(done)

    def take(self, ticket: Future, name: str) -> Any:
        outcome, payload = ticket.result()
        if outcome == "done":
            return pickle.loads(payload)
        if outcome == "failed":
            cause, trace = pickle.loads(payload)
            raise failure_of(cause, name, trace)
        raise WorkerError(
            f"{name} died: its process was killed or crashed, perhaps because memory ran out", RESTART_HINT, "killed"
        )

    def has_begun(self, process: _Process) -> bool:
        return True

    def stacks_from_outside(self, places: Sequence[tuple[int, str]]) -> list[str]:
        return stacks_from_outside([pid for pid, _ in places])

    def kill(self, process: _Process, at: tuple[int, str] | None) -> None:
        process.kill()


def _gpus_of(home: Sequence[Mapping[str, Any]]) -> list[str]:
    return [gpu for place in home for gpu in place["gpus"]]


def _visible_gpus() -> list[str]:
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [gpu for gpu in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if gpu]
    import torch

    return [str(i) for i in range(torch.cuda.device_count())]
