"""Groups whose members are Ray actors."""

from __future__ import annotations

import contextlib
import os
import pickle
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import psutil
import ray
from ray import cloudpickle
from ray._private.state import actors
from ray.exceptions import OutOfMemoryError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from trainer.cluster.stacks import own_stacks, stacks_from_outside
from trainer.cluster.timeouts import Patience
from trainer.cluster.worker_groups import WorkerGroup
from trainer.cluster.worker_setup import failure_of, prepare_process
from trainer.errors import RESTART_HINT, WorkerError, one_line

_END_S = 10.0
_POLL_INTERVAL_S = 20.0  # longer than py-spy may take on a node, after a process of Ray has started there


class _Host:
    """An actor that hosts one object of any class. Each of the channels call, aside and pulse has its own thread.

    The channel pulse is served while the object is built, too: Ray serves none before the constructor is done.
    """

    def __init__(self) -> None:
        prepare_process(ray.util.get_node_ip_address())
        self._building: Future[Any] = Future()

    def build(self, message: bytes) -> None:
        """Build the object, before any other call."""
        try:
            factory, args = pickle.loads(message)  # imports what they need
            self._building.set_result(factory(*args))
        except Exception as error:  # each call raises it
            self._building.set_exception(error)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._building.result(), method)(*args, **kwargs)

    @ray.method(concurrency_group="aside")
    def aside(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Run `method` at the same time as other calls."""
        return getattr(self._building.result(), method)(*args, **kwargs)

    @ray.method(concurrency_group="pulse")
    def pulse(self, _: str) -> tuple[int, str, bool]:
        """Return the id of this process, the address of its node, and whether its object is built."""
        return os.getpid(), ray.util.get_node_ip_address(), self._building.done()

    @ray.method(concurrency_group="pulse")
    def stacks(self, _: str) -> str:
        """Return the stacks of the threads of this process."""
        return own_stacks()

    @ray.method(concurrency_group="pulse")
    def where(self, _: str) -> dict[str, Any]:
        """Return the address and the id of the node, and the GPU ids of this actor."""
        context = ray.get_runtime_context()
        gpus = [str(i) for i in ray.get_gpu_ids()]
        return {"host": ray.util.get_node_ip_address(), "node": context.get_node_id(), "gpus": gpus}


class _Actors:
    """Implements `trainer.cluster.worker_groups.Backend`. A ticket is a Ray object reference."""

    def begin(self, process: Any, channel: str, method: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        return getattr(process, channel).remote(method, *args, **kwargs)

    def wait(self, tickets: list[Any], timeout_s: float) -> list[Any]:
        return ray.wait(tickets, num_returns=1, timeout=timeout_s)[0]

    def take(self, ticket: Any, name: str) -> Any:
        try:
            return ray.get(ticket)
        except RayError as error:
            raise _as_itself(error, name) from None

    def has_begun(self, process: Any) -> bool:
        return _place_of(process) is not None

    def stacks_from_outside(self, places: Sequence[tuple[int, str]]) -> list[str]:
        pids = defaultdict[str, list[int]](list)
        for pid, address in places:
            pids[address].append(pid)
        own, asked, end = ray.util.get_node_ip_address(), {}, time.monotonic() + _POLL_INTERVAL_S
        look = ray.remote(num_cpus=0, max_retries=0)(stacks_from_outside)
        for node in ray.nodes():
            address, at = node["NodeManagerAddress"], NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            if node["Alive"] and address in pids and address != own:
                asked[look.options(scheduling_strategy=at).remote(pids[address])] = address
        seen = dict(zip(((pid, own) for pid in pids[own]), stacks_from_outside(pids[own]), strict=True))
        while asked:
            done, _ = ray.wait(list(asked), timeout=max(0.0, end - time.monotonic()))
            if not done:
                break
            address = asked.pop(done[0])
            with contextlib.suppress(RayError):
                seen.update(zip(((pid, address) for pid in pids[address]), ray.get(done[0]), strict=True))
        return [
            seen.get(place, f"Neither the process nor its node answers within {_POLL_INTERVAL_S:g} s.\n")
            for place in places
        ]

    def kill(self, process: Any, at: tuple[int, str] | None) -> None:
        at = at or _place_of(process)
        ray.kill(process, no_restart=True)
        if at is not None and at[1] == ray.util.get_node_ip_address():
            _end_stopped(at[0])  # Ray asks the process to end, and a stopped process does not hear it


def launch_actors(
    name: str,
    factory: Callable[..., Any],
    member_args: Sequence[tuple],
    options: Callable[[int], dict[str, Any]],
    env: dict[str, str],
    patience: Patience,
) -> WorkerGroup:
    """Start one actor for each entry of `member_args`. Does not wait for the actors.

    Args:
        options: returns Ray's options of a member, each time that it is started.
    """
    remote = ray.remote(max_restarts=0, max_task_retries=0, concurrency_groups={"aside": 1, "pulse": 1})(_Host)

    def launch(member: int) -> Any:
        own = dict(options(member))
        variables = {**env, **own.pop("env", {})}
        process = remote.options(**own, runtime_env={"env_vars": variables}).remote()
        process.build.remote(cloudpickle.dumps((factory, member_args[member])))
        return process

    return WorkerGroup(name, len(member_args), launch, _Actors(), patience)


def _place_of(process: Any) -> tuple[int, str] | None:
    """Return what Ray knows of an actor: the id of its process and the address of its node. None: it has none yet."""
    known = actors(process._actor_id.hex())
    return (known["Pid"], known["Address"]["IPAddress"]) if known.get("Pid") else None


def _as_itself(error: RayError, name: str) -> Exception:
    """Return the exception that a member raised, without the Ray exception around it; for a dead member, the reason."""
    if isinstance(error, RayTaskError):
        return failure_of(error.cause, name, str(error))
    if isinstance(error, RayActorError) and error.actor_init_failed:  # the text holds its traceback
        return WorkerError(f"{name} died: {str(error).strip()}", cause="killed")
    cause = "killed"
    if isinstance(error, OutOfMemoryError):
        reason, cause = "Ray ended it, because the memory of its machine ran low", "memory"
    elif isinstance(error, RayActorError):
        reason = "its process was killed or crashed, perhaps because memory ran out"
    else:
        reason = one_line(str(error))
    return WorkerError(
        f"{name} died: {reason}",
        f"{RESTART_HINT} (its last output is among Ray's logs, those of a Ray that the job has started are in ray_logs "
        "of the run directory)",
        cause,
    )


def _end_stopped(pid: int) -> None:
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        if "ray::" in "".join(process.cmdline()):  # the id may belong to another process by now
            process.kill()
            process.wait(_END_S)  # the next process may need its memory, above all on a GPU
