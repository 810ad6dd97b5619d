"""The worker groups of a job as threads of the driver, so that breakpoints stop in any of them. For debugging."""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any

import torch

from trainer.cluster.fork_server import HOST, pack_error
from trainer.cluster.process_cluster import LocalCluster, Processes
from trainer.cluster.resources import FindGpus
from trainer.cluster.worker_groups import Timeouts, WorkerGroup
from trainer.config import Config
from trainer.errors import UserError
from trainer.files.shared_memory import PrivateDirectory
from trainer.process.network import use_network_of
from trainer.process.tracing import WANTED


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


class WorkerThread:
    """Hosts one object. Each of the channels "call" and "background" has its own thread.

    The result of a call is a future of `(has_failed, payload)`, as that of a process. `exclusive` is held while an
    object is built or called: libraries that build models replace functions of torch meanwhile.
    """

    def __init__(self, name: str, factory: Callable[..., Any], args: tuple, exclusive: AbstractContextManager):
        self._exclusive = exclusive
        self._object: Future[Any] = Future()
        self._calls: dict[str, queue.SimpleQueue] = {}
        for channel in ("call", "background"):
            self._calls[channel] = queue.SimpleQueue()
            work = (channel, *((factory, args) if channel == "call" else (None, ())))
            threading.Thread(target=self._serve, args=work, name=f"{name} {channel}", daemon=True).start()

    def begin(self, channel: str, method: str, args: tuple, kwargs: dict[str, Any]) -> Future:
        call: Future = Future()
        if channel == "heartbeat":
            own = {"pid": os.getpid(), "is_built": self._object.done()}
            call.set_result((False, pickle.dumps(own | {"host": HOST, "node": "this", "gpus": []})))
        else:
            self._calls[channel].put((call, pickle.dumps((method, args, kwargs), pickle.HIGHEST_PROTOCOL)))
        return call

    def kill(self) -> None:
        """End the threads after the calls that have begun."""
        for calls in self._calls.values():
            calls.put(None)

    def _serve(self, channel: str, factory: Callable[..., Any] | None, args: tuple) -> None:
        torch.set_num_threads(1)  # a thread has a setting of its own
        if factory is not None:
            try:
                with self._exclusive:
                    self._object.set_result(factory(*args))
            except BaseException as error:
                self._object.set_exception(error)
        while (message := self._calls[channel].get()) is not None:
            call, payload = message
            try:
                method, arguments, kwargs = pickle.loads(payload)
                kwargs.pop(WANTED, None)  # the spans of this process are those of the driver
                function = getattr(self._object.result(), method)
                with self._exclusive if channel == "call" else contextlib.nullcontext():
                    result = function(*arguments, **kwargs)
                call.set_result((False, pickle.dumps(result)))
            except BaseException as error:
                call.set_result((True, pack_error(error)))


def _leave_process_group() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
