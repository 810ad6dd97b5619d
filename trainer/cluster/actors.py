"""Groups of actors that are called together and fail together."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from trainer.errors import UserError, WorkerError

# How long to listen to the other members once one has failed: when a rank dies, its peers fail too, with
# a closed connection, and may be heard first. The user should read the cause, not an echo of it.
_ECHO_S = 2.0
_ECHO_SIGNS = ("Connection closed", "Connection reset", "gloo", "NCCL", "recvBytes", "process group")


class _Member:
    """An actor that hosts one object of any class."""

    def __init__(self, factory: Callable[..., Any], args: tuple, kwargs: dict):
        self._object = factory(*args, **kwargs)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._object, method)(*args, **kwargs)

    def where(self) -> dict[str, Any]:
        """Node address and GPU ids of this actor."""
        context = ray.get_runtime_context()
        gpus = [str(i) for i in ray.get_gpu_ids()]
        return {"host": ray.util.get_node_ip_address(), "node": context.get_node_id(), "gpus": gpus}


class _MemberAside(_Member):
    """An actor with a second thread."""

    @ray.method(concurrency_group="aside")
    def call_aside(self, method: str) -> Any:
        """Run `method` beside other calls."""
        return getattr(self._object, method)()


class ActorGroup:
    """Actors of one kind. A call goes to all members; the first failure is raised as itself."""

    def __init__(self, name: str, actors: Sequence[Any]):
        self.name = name
        self._actors = list(actors)

    @classmethod
    def launch(
        cls,
        name: str,
        factory: Callable[..., Any],
        member_args: Sequence[tuple],
        options: Sequence[dict[str, Any]],
        env: dict[str, str],
        aside: bool = False,
    ) -> ActorGroup:
        """Start one actor for each entry of `member_args`, with these Ray `options`; returns at once.

        Args:
            aside: give each actor a second thread, for `start_aside`.
        """
        groups: dict[str, Any] = {"concurrency_groups": {"aside": 1}} if aside else {}
        remote = ray.remote(max_restarts=0, max_task_retries=0, **groups)(_MemberAside if aside else _Member)
        actors = []
        for args, extra in zip(member_args, options, strict=True):
            merged = {**extra, "runtime_env": {"env_vars": {**env, **extra.get("env", {})}}}
            merged.pop("env", None)
            actors.append(remote.options(**merged).remote(factory, args, {}))
        return cls(name, actors)

    def __len__(self) -> int:
        return len(self._actors)

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call `method` on all members with the same arguments; results in member order."""
        return self.start(method, *args, **kwargs).result()

    def call_each(self, method: str, args: Sequence[tuple]) -> list[Any]:
        """Call `method` on all members, each with its own arguments."""
        refs = [a.call.remote(method, *own) for a, own in zip(self._actors, args, strict=True)]
        return Pending(self.name, refs).result()

    def call_one(self, member: int, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call `method` on one member."""
        return Pending(self.name, [self._actors[member].call.remote(method, *args, **kwargs)], member).result()[0]

    def start(self, method: str, *args: Any, **kwargs: Any) -> Pending:
        """Begin calling `method` on all members; `result()` of what this returns waits for it."""
        return Pending(self.name, [actor.call.remote(method, *args, **kwargs) for actor in self._actors])

    def start_aside(self, method: str) -> Pending:
        """Begin `method` on all members, on a thread beside the one that other calls share."""
        return Pending(self.name, [actor.call_aside.remote(method) for actor in self._actors])

    def where(self) -> list[dict[str, Any]]:
        """Host, node id and GPU ids of each member."""
        return Pending(self.name, [actor.where.remote() for actor in self._actors]).result()

    def kill(self) -> None:
        """End the members' processes."""
        for actor in self._actors:
            ray.kill(actor, no_restart=True)
        self._actors = []


class Pending:
    """Calls under way on the members of a group."""

    def __init__(self, name: str, refs: Sequence[Any], first_member: int = 0):
        self._name = name
        self._refs = list(refs)
        self._first_member = first_member

    def result(self, timeout_s: float | None = None) -> list[Any]:
        """Wait for all members; results in member order.

        Raises:
            the exception of the member that failed, with its rank in a note, within seconds of the failure
            and without waiting for the others; WorkerError when a member's process died; TimeoutError.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        results: dict[int, Any] = {}
        waiting = {ref: i for i, ref in enumerate(self._refs)}
        failures: list[Exception] = []
        while waiting:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            done, _ = ray.wait(list(waiting), num_returns=1, timeout=left)
            if not done:
                if failures:
                    break
                raise TimeoutError(f"{self._name} did not answer within {timeout_s} s")
            member = waiting.pop(done[0])
            try:
                results[member] = ray.get(done[0])
            except (RayTaskError, RayActorError, GetTimeoutError) as error:
                failures.append(self._as_itself(error, member + self._first_member))
                deadline = min(deadline or float("inf"), time.monotonic() + _ECHO_S)
        if failures:
            raise min(failures, key=_echo_rank)
        return [results[i] for i in range(len(self._refs))]

    def _as_itself(self, error: Exception, member: int) -> Exception:
        where = f"{self._name} {member}"
        if isinstance(error, RayTaskError):
            cause = error.cause
            if isinstance(cause, UserError):
                return cause
            if isinstance(cause, Exception):
                cause.add_note(f"in {where}; its own traceback:\n{error}")
                return cause
            return WorkerError(f"{where} failed: {error}")
        return WorkerError(f"{where} died: {str(error).strip()}")


def _echo_rank(error: Exception) -> int:
    """Causes sort before echoes: what the user did, what a member raised, a death, a broken connection."""
    if isinstance(error, UserError):
        return 0
    if isinstance(error, WorkerError):
        return 2
    return 3 if any(sign in str(error) for sign in _ECHO_SIGNS) else 1
