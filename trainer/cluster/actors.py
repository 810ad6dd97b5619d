"""Groups of actors that are called together and fail together."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayError, RayTaskError

from trainer.errors import UserError, WorkerError, memory_ran_out, one_line
from trainer.output import guard_output, show_messages
from trainer.signals import SIGNALS, Stopped

LOG = logging.getLogger(__name__)

# How long to listen to the other members once one has failed: when a rank dies, its peers fail too, with
# a closed connection, and may be heard first. The user should read the cause, not an echo of it.
_ECHO_S = 2.0
_ECHO_SIGNS = ("Connection closed", "Connection reset", "gloo", "NCCL", "recvBytes", "process group")
_LOOK_S = 0.5  # between two looks at signals, at Ray and at the members' pulses, while a call runs
_PULSE_S = 2.0  # between two pulses
_SAY_S = 20.0  # silence after which the user is told
_SAY_START_S = 300.0  # time to start after which the user is told; an engine may compile for minutes
_LEAVE_S = 10.0  # silence after which a stop request no longer waits for the member


class _Member:
    """An actor that hosts one object of any class. Calls, calls aside and pulses have a thread each."""

    def __init__(self, factory: Callable[..., Any], args: tuple, kwargs: dict):
        _stay_on_the_interface_of(ray.util.get_node_ip_address())
        guard_output()  # of the user's functions too
        show_messages()
        self._object = factory(*args, **kwargs)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._object, method)(*args, **kwargs)

    @ray.method(concurrency_group="aside")
    def call_aside(self, method: str) -> Any:
        """Run `method` beside other calls."""
        return getattr(self._object, method)()

    @ray.method(concurrency_group="pulse")
    def pulse(self) -> str:
        """Answer at any time, also during a call; returns what this process is."""
        return f"process {os.getpid()} on {ray.util.get_node_ip_address()}"

    def where(self) -> dict[str, Any]:
        """Node address and GPU ids of this actor."""
        context = ray.get_runtime_context()
        gpus = [str(i) for i in ray.get_gpu_ids()]
        return {"host": ray.util.get_node_ip_address(), "node": context.get_node_id(), "gpus": gpus}


def _stay_on_the_interface_of(address: str) -> None:
    """Keep the process groups of this process to the network interface that has `address`.

    What the user has set stays.
    """
    for name, entries in psutil.net_if_addrs().items():
        if address in (entry.address for entry in entries):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
    os.environ.setdefault("VLLM_HOST_IP", address)


@dataclass(frozen=True)
class Patience:
    """How long the driver waits for actors."""

    silence_s: float
    """An actor that answers no pulse for so long counts as dead."""
    call_s: float
    """Longest time that one call may take."""
    lost: Callable[[], str | None] = lambda: None
    """Which part of Ray itself has died, if one has."""

    def check_ray(self) -> None:
        """Check that all of Ray is there. Without a part of it, a call of Ray may hang, or end this process.

        Raises:
            WorkerError: a part has died.
        """
        if part := self.lost():
            raise WorkerError(f"Ray's {part} died, and the job with it; restart it with the same command")


class _Handle:
    """One actor as the driver sees it: its calls, and whether it still answers. The loop and a save both ask."""

    def __init__(self, name: str, actor: Any):
        self.name = name
        self.actor = actor
        # Under way, from the beginning: its answer tells when the actor has started.
        self._pulse: Any = actor.pulse.remote()
        self._asked = time.monotonic()
        self._who: str | None = None
        self._said = False
        self._lock = threading.Lock()

    def __str__(self) -> str:
        return f"{self.name} ({self._who})" if self._who else self.name

    def silence_s(self) -> float:
        """Seconds that a pulse has been without an answer; 0 while the actor starts."""
        with self._lock:
            now = time.monotonic()
            if self._pulse is not None and ray.wait([self._pulse], timeout=0)[0]:
                self._hear()
            if self._pulse is None and now - self._asked > _PULSE_S:
                self._pulse, self._asked = self.actor.pulse.remote(), now
            return now - self._asked if self._pulse is not None and self._who is not None else 0.0

    def _hear(self) -> None:
        try:
            self._who = ray.get(self._pulse)
        except ray.exceptions.RayError:
            pass  # it died: the call under way says so
        else:
            if self._said:
                LOG.warning("%s answers now", self)
        self._pulse, self._said = None, False

    @property
    def starts(self) -> bool:
        """It has not answered yet: until it has loaded what it hosts, it cannot."""
        return self._who is None

    def say_silent(self, silence_s: float, limit_s: float) -> None:
        """Tell the user, once for each silence."""
        if not self._said:
            self._said = True
            LOG.warning("%s does not answer since %.0f s; the job ends after %g s of silence", self, silence_s, limit_s)

    def say_starting(self, elapsed_s: float, limit_s: float) -> None:
        """Tell the user, once."""
        if not self._said:
            self._said = True
            LOG.warning("%s has not started after %.0f s; the job ends after %g s", self, elapsed_s, limit_s)


class ActorGroup:
    """Actors of one kind. A call goes to all members; the first failure is raised as itself."""

    def __init__(self, name: str, actors: Sequence[Any], patience: Patience):
        self.name = name
        self._members = [_Handle(f"{name} {i}", actor) for i, actor in enumerate(actors)]
        self._patience = patience

    @classmethod
    def launch(
        cls,
        name: str,
        factory: Callable[..., Any],
        member_args: Sequence[tuple],
        options: Sequence[dict[str, Any]],
        env: dict[str, str],
        patience: Patience,
    ) -> ActorGroup:
        """Start one actor for each entry of `member_args`, with these Ray `options`; returns at once."""
        remote = ray.remote(max_restarts=0, max_task_retries=0, concurrency_groups={"aside": 1, "pulse": 1})(_Member)
        actors = []
        for args, extra in zip(member_args, options, strict=True):
            merged = {**extra, "runtime_env": {"env_vars": {**env, **extra.get("env", {})}}}
            merged.pop("env", None)
            actors.append(remote.options(**merged).remote(factory, args, {}))
        return cls(name, actors, patience)

    def __len__(self) -> int:
        return len(self._members)

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call `method` on all members with the same arguments; results in member order."""
        return self.start(method, *args, **kwargs).result()

    def call_each(self, method: str, args: Sequence[tuple]) -> list[Any]:
        """Call `method` on all members, each with its own arguments."""
        pairs = list(zip(self._members, args, strict=True))
        return self._begin([(member, member.actor.call, (method, *own), {}) for member, own in pairs]).result()

    def call_one(self, member: int, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call `method` on one member."""
        handle = self._members[member]
        return self._begin([(handle, handle.actor.call, (method, *args), kwargs)]).result()[0]

    def start(self, method: str, *args: Any, **kwargs: Any) -> Pending:
        """Begin calling `method` on all members; `result()` of what this returns waits for it."""
        return self._begin([(member, member.actor.call, (method, *args), kwargs) for member in self._members])

    def start_aside(self, method: str) -> Pending:
        """Begin `method` on all members, on a thread beside the one that other calls share."""
        return self._begin([(member, member.actor.call_aside, (method,), {}) for member in self._members], aside=True)

    def where(self) -> list[dict[str, Any]]:
        """Host, node id and GPU ids of each member."""
        return self._begin([(member, member.actor.where, (), {}) for member in self._members]).result()

    def kill(self) -> None:
        """End the members' processes."""
        for member in self._members:
            ray.kill(member.actor, no_restart=True)
        self._members = []

    def _begin(self, calls: Sequence[tuple[_Handle, Any, tuple, dict]], aside: bool = False) -> Pending:
        self._patience.check_ray()
        with SIGNALS.held():
            refs = [method.remote(*args, **kwargs) for _, method, args, kwargs in calls]
        return Pending([member for member, *_ in calls], refs, self._patience, aside)


class Pending:
    """Calls under way on the members of a group.

    Args:
        aside: the result is awaited beside the loop, which hears a request to stop by itself.
    """

    def __init__(self, members: Sequence[_Handle], refs: Sequence[Any], patience: Patience, aside: bool = False):
        self._members = list(members)
        self._refs = list(refs)
        self._patience = patience
        self._aside = aside

    def result(self) -> list[Any]:
        """Wait for all members; results in member order.

        Raises:
            the exception of the member that failed, with its rank in a note, within seconds of the failure
            and without waiting for the others; WorkerError: a member's process died, does not answer, or the call
            takes too long, or Ray died; Stopped: a signal asks to stop, and a member does not answer.
        """
        started = time.monotonic()
        deadline = float("inf")  # of the echoes, once a member has failed
        results: dict[int, Any] = {}
        waiting = {ref: i for i, ref in enumerate(self._refs)}
        failures: list[Exception] = []
        while waiting and time.monotonic() < deadline:
            with SIGNALS.held():
                done, _ = ray.wait(list(waiting), num_returns=1, timeout=_LOOK_S)
            if not done:
                if not failures:
                    self._look([self._members[i] for i in waiting.values()], time.monotonic() - started)
                continue
            i = waiting.pop(done[0])
            try:
                with SIGNALS.held():
                    results[i] = ray.get(done[0])
            except RayError as error:
                failures.append(_as_itself(error, self._members[i].name))
                deadline = min(deadline, time.monotonic() + _ECHO_S)
        if failures:
            raise min(failures, key=_echo_rank)
        return [results[i] for i in range(len(self._refs))]

    def _look(self, members: Sequence[_Handle], elapsed_s: float) -> None:
        """While nothing comes: does Ray live, does everybody answer, is it taking too long?"""
        patience = self._patience
        patience.check_ray()
        for member in members:
            with SIGNALS.held():
                silence_s = member.silence_s()
            if silence_s > _LEAVE_S and SIGNALS.first and not self._aside:
                raise Stopped(
                    f"stopped by {SIGNALS.first} while {member} did not answer: this step is not saved, the last "
                    "checkpoint is as it was; the same command with trainer.resume_mode=latest continues the run"
                )
            if silence_s > patience.silence_s:
                raise WorkerError(
                    f"{member} has not answered for {silence_s:.0f} s (trainer.silence_timeout_s): its process or its "
                    "machine stands still; restart the job with the same command"
                )
            if silence_s > _SAY_S:
                member.say_silent(silence_s, patience.silence_s)
            if member.starts and elapsed_s > _SAY_START_S:
                member.say_starting(elapsed_s, patience.call_s)
        if elapsed_s > patience.call_s:
            raise WorkerError(
                f"{', '.join(map(str, members))}: no result after {elapsed_s:.0f} s (trainer.call_timeout_s); "
                "restart the job with the same command, or raise the limit"
            )


def _as_itself(error: RayError, where: str) -> Exception:
    """The exception that a member raised, in place of Ray's around it; for a dead member, what is known of its end."""
    if isinstance(error, RayTaskError):
        cause = error.cause
        if isinstance(cause, UserError):
            return cause
        if isinstance(cause, Exception):
            if memory_ran_out(cause):
                return WorkerError(
                    f"{where} has no memory left ({one_line(str(cause)) or 'MemoryError'}); lower "
                    "trainer.max_tokens_per_micro_batch or rollout.max_num_seqs, or use more devices, and restart the "
                    "job with the same command"
                )
            cause.add_note(f"in {where}; its own traceback:\n{error}")
            return cause
        return WorkerError(f"{where} failed: {error}")
    if isinstance(error, RayActorError) and error.actor_init_failed:  # the text holds its traceback
        return WorkerError(f"{where} died: {str(error).strip()}")
    if isinstance(error, OutOfMemoryError):
        reason = "Ray ended it, because the memory of its machine ran low"
    elif isinstance(error, RayActorError):
        reason = "its process was killed or crashed, perhaps because memory ran out"
    else:
        reason = one_line(str(error))
    return WorkerError(
        f"{where} died: {reason}; restart the job with the same command (its last output is among Ray's logs, those "
        f"of a Ray that the job has started are in ray_logs of the run directory)"
    )


def _echo_rank(error: Exception) -> int:
    """Causes sort before echoes: what the user did, what a member raised, a death, a broken connection."""
    if isinstance(error, UserError):
        return 0
    if isinstance(error, WorkerError):
        return 2
    return 3 if any(sign in str(error) for sign in _ECHO_SIGNS) else 1
