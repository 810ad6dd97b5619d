"""The actor that hosts a worker, and how its calls are made."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
from concurrent.futures import Future
from typing import Any

import psutil
import ray
from ray._private.state import actors
from ray.exceptions import OutOfMemoryError, RayActorError, RayError, RayTaskError

from trainer.cluster.worker_groups import failure_of, prepare_process
from trainer.errors import RESTART_HINT, WorkerError, one_line
from trainer.process import time_limits
from trainer.process.startup import importing
from trainer.process.tracing import MAIN, answer_call


class Host:
    """An actor that hosts one object of any class. Each concurrency group has its own thread.

    The group "heartbeat" also runs while the object is built. Ray runs no method before the constructor returns, so
    `build` creates the object instead of the constructor.
    """

    def __init__(self) -> None:
        prepare_process(ray.util.get_node_ip_address())
        self._building: Future[Any] = Future()

    def build(self, path: list[str], message: bytes) -> None:
        """Build the object, whose modules may be in the directories `path`. Must be the first call."""
        sys.path += [directory for directory in path if directory not in sys.path]
        try:
            with importing():
                factory, args = pickle.loads(message)
            self._building.set_result(factory(*args))
        except Exception as error:  # each call raises it
            self._building.set_exception(error)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return answer_call(getattr(self._building.result(), method), MAIN, args, kwargs, method)

    @ray.method(concurrency_group="background")
    def background(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return answer_call(getattr(self._building.result(), method), "background", args, kwargs, method)

    @ray.method(concurrency_group="heartbeat")
    def heartbeat(self, _: str) -> dict[str, Any]:
        """See `trainer.cluster.worker_groups.Backend.begin`."""
        node, gpus = ray.get_runtime_context().get_node_id(), [str(i) for i in ray.get_gpu_ids()]
        own = {"pid": os.getpid(), "is_built": self._building.done()}
        return own | {"host": ray.util.get_node_ip_address(), "node": node, "gpus": gpus}


class Actors:
    """Implements `trainer.cluster.worker_groups.Backend`. A ticket is a Ray object reference."""

    def begin(self, process: Any, channel: str, method: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        return getattr(process, channel).remote(method, *args, **kwargs)

    def wait(self, tickets: list[Any], timeout_s: float) -> list[Any]:
        done, others = ray.wait(tickets, num_returns=1, timeout=timeout_s)
        if done and others:  # a caller that looks late must not take what is done for what still runs
            done += ray.wait(others, num_returns=len(others), timeout=0)[0]
        return done

    def get(self, ticket: Any, name: str) -> Any:
        try:
            return ray.get(ticket)
        except RayError as error:
            raise _original_error(error, name) from None

    def has_started(self, process: Any) -> bool:
        return _process_id_of(process) is not None

    def kill(self, process: Any, process_id: tuple[int, str] | None) -> None:
        process_id = process_id or _process_id_of(process)
        ray.kill(process, no_restart=True)
        if process_id is not None and process_id[1] == ray.util.get_node_ip_address():
            _kill_stopped(process_id[0])  # Ray asks the process to exit, and a stopped process cannot respond


def _process_id_of(process: Any) -> tuple[int, str] | None:
    """Return the pid of an actor and the address of its node, or None if Ray has not started the actor yet."""
    state = actors(process._actor_id.hex())
    return (state["Pid"], state["Address"]["IPAddress"]) if state.get("Pid") else None


def _original_error(error: RayError, name: str) -> Exception:
    """Return the exception that a worker raised, without the Ray exception around it. For a dead worker: the reason."""
    if isinstance(error, RayTaskError):
        return failure_of(error.cause, name, str(error))
    if isinstance(error, RayActorError) and error.actor_init_failed:  # the text contains its traceback
        return WorkerError(f"{name} died: {str(error).strip()}", cause="killed")
    cause = "killed"
    if isinstance(error, OutOfMemoryError):
        reason, cause = "Ray killed it because the memory of its machine ran low", "memory"
    elif isinstance(error, RayActorError):
        reason = "its process was killed or crashed, perhaps because memory ran out"
    else:
        reason = one_line(str(error))
    return WorkerError(
        f"{name} died: {reason}",
        f"{RESTART_HINT} (the last output of the process is in Ray's logs; if the job started Ray, they are in "
        "ray_logs of the run directory)",
        cause,
    )


def _kill_stopped(pid: int) -> None:
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        if "ray::" in "".join(process.cmdline()):  # the pid may belong to another process by now
            process.kill()
            process.wait(time_limits.PROCESS_EXIT_S)  # the next process may need its memory, above all on a GPU
