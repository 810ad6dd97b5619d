"""Groups of processes that are called together and fail together. Ray or `LocalCluster` starts them."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

from trainer.cluster.resources import FindHome
from trainer.cluster.stacks import own_stacks, write_stacks
from trainer.cluster.timeouts import Patience
from trainer.errors import RESTART_HINT, FailureSource, UserError, WorkerError, set_origin
from trainer.process.signals import CONTINUES, SIGNALS, Stopped

LOG = logging.getLogger(__name__)

# When a rank dies, the other ranks fail too, because their connections close, and their errors may arrive first. The
# user should read the cause, not its effects.
_ECHO_S = 2.0  # how long to wait for the other members after one has failed
_ECHO_SIGNS = ("Connection closed", "Connection reset", "gloo", "NCCL", "recvBytes", "process group")
_POLL_INTERVAL_S = 0.5  # between two checks of signals, of the cluster and of the members' pulses, while a call runs
_PULSE_S = 2.0  # between two pulses
_SAY_S = 20.0  # silence after which a warning is logged
_SAY_START_S = 300.0  # start-up time after which a warning is logged; an engine may compile for minutes
_HANG_FACTOR = 10.0
_KNOWN_CALLS = 3  # calls after which it is known how long they take
_STACKS_S = 3.0  # time for a process to return its stacks
_LEAVE_S = 10.0  # silence after which a stop request no longer waits for the member


class Cluster(Protocol):
    """Starts the groups of a job: `ray_cluster.RayCluster`, or `process_cluster.LocalCluster`."""

    device: str
    """`cuda` or `cpu`."""
    object_store_bytes: int
    """Shared memory that stored values may use, in bytes."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End all processes."""
        ...

    def count_ranks(self) -> int:
        """Return how many ranks to start: `trainer.num_workers`, or fewer if there is no room for so many."""
        ...

    def launch_ranks(self, name: str, factory: Any, env: dict[str, str], count: int | None = None) -> WorkerGroup:
        """Start `count` processes, which host `factory(rank, world_size, device)`. Does not wait.

        Args:
            count: None: `trainer.num_workers`.
        """
        ...

    def launch_engines(
        self, factory: Any, args: tuple, env: dict[str, str], home: FindHome | None = None
    ) -> WorkerGroup:
        """Start `rollout.num_engines` processes, which host `factory(*args)`, on GPUs of `home` or of their own."""
        ...

    def has_room(self, group: WorkerGroup) -> bool:
        """Return whether a member of `group` has a place. One whose node was lost may have to wait for a place."""
        ...

    def put(self, value: Any) -> Any:
        """Store a copy of `value` and return a reference. In a call, members get the value instead of the reference."""
        ...

    def meeting_place(self, group: WorkerGroup, port: int = 0) -> str:
        """Return the address at which the members of a process group meet. The first rank of `group` is its first rank.

        Args:
            port: port on the machine of that rank. 0: a free port, or a file if all members are on this machine.
        """
        ...

    def release(self, group: WorkerGroup) -> None:
        """End the processes of the group and free their resources."""
        ...

    def stacks(self) -> dict[str, str]:
        """Return the stacks of all processes, by name. Any thread may ask."""
        ...

    def examine(self, error: Exception) -> Exception:
        """Return a failure of a member, or the failure of a GPU that explains it (see `GpuHealthCheck`)."""
        ...


class Backend(Protocol):
    """Sends calls to the processes of a cluster. A ticket stands for one running call."""

    def begin(self, process: Any, channel: str, method: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Begin a call and return its ticket. Calls on different channels run at the same time.

        Args:
            channel: `call` and `aside` run `method` of the object that the process hosts. During a call too, and while
                the object is built, `pulse` returns the id of the process, the address of its node, and whether the
                object is built; `where` its host, its node and its GPU ids; `stacks` its stacks as text.
        """
        ...

    def wait(self, tickets: list[Any], timeout_s: float) -> list[Any]:
        """Wait at most `timeout_s` until a call is done. Return the tickets of the calls that are done."""
        ...

    def take(self, ticket: Any, name: str) -> Any:
        """Return the result of a call that is done, or raise the exception that the user should see.

        Args:
            name: name of the member, for messages.
        """
        ...

    def has_begun(self, process: Any) -> bool:
        """Return whether the process has been started. It may have to wait for a place."""
        ...

    def stacks_from_outside(self, places: Sequence[tuple[int, str]]) -> list[str]:
        """Return the stacks of processes that do not answer, by their ids and the addresses of their nodes."""
        ...

    def kill(self, process: Any, at: tuple[int, str] | None) -> None:
        """End the process, even if it is stopped.

        Args:
            at: the id of the process and the address of its node; None: not known.
        """
        ...


class _Member:
    """One process, and whether it still answers. The loop and the thread of a save both use it."""

    def __init__(self, name: str, process: Any, backend: Backend):
        self.name = name
        self.process = process
        self._backend = backend
        self._pulse, self._asked = self._begin_pulse(), time.monotonic()
        self.at: tuple[int, str] | None = None
        """The id of the process and the address of its node, once it has answered."""
        self.starts = True
        """Its object is not known to be built."""
        self._said = self._said_starts = False
        self._lock = threading.Lock()

    def __str__(self) -> str:
        return f"{self.name} (process {self.at[0]} on {self.at[1]})" if self.at else self.name

    @property
    def origin(self) -> FailureSource:
        return FailureSource(self.name, self.at[1] if self.at else "")

    def silence_s(self) -> float:
        """Return the seconds that a pulse has waited for its answer; 0 while the process waits for a place."""
        with self._lock:
            now = time.monotonic()
            if self._pulse is not None and self._backend.wait([self._pulse], 0):
                self._hear()
            if self._pulse is None and now - self._asked > _PULSE_S:
                self._pulse, self._asked = self._begin_pulse(), now
            if self.at is None and not self._backend.has_begun(self.process):
                self._asked = now
            return now - self._asked if self._pulse is not None else 0.0

    def end(self) -> None:
        self.silence_s()  # the answer to the first pulse tells where it is
        self._backend.kill(self.process, self.at)

    def _begin_pulse(self) -> Any:
        return self._backend.begin(self.process, "pulse", "", (), {})

    def _hear(self) -> None:
        try:
            *at, is_built = self._backend.take(self._pulse, self.name)
        except Exception:
            pass  # it died: the running call raises the reason
        else:
            self.at, self.starts = (at[0], at[1]), self.starts and not is_built  # an old pulse may be heard late
            if self._said:
                LOG.warning("%s answers now", self)
        self._pulse, self._said = None, False

    def say_silent(self, silence_s: float, limit_s: float) -> None:
        """Log a warning, once for each silence."""
        if not self._said:
            self._said = True
            LOG.warning(
                "%s has not answered for %.0f s; it counts as dead after %g s of silence", self, silence_s, limit_s
            )

    def say_starting(self, elapsed_s: float, limit_s: float) -> None:
        """Log a warning, once."""
        if not self._said_starts:
            self._said_starts = True
            LOG.warning("%s has not started after %.0f s; after %g s it counts as dead", self, elapsed_s, limit_s)


class WorkerGroup:
    """Processes of one kind. A call goes to all members, and the cause of a failure is raised unchanged.

    Args:
        name: name of a member in messages, before its number.
        count: number of members.
        launch: begins to start the process of a member, by its number. Returns the process in the form that `backend`
            uses.
    """

    def __init__(self, name: str, count: int, launch: Callable[[int], Any], backend: Backend, patience: Patience):
        self.name = name
        self.backend = backend
        self.patience = patience
        self._launch = launch
        self._durations: dict[str, tuple[int, float]] = {}  # number of calls by kind, and seconds of the longest
        self.members = [_Member(f"{name} {i}", launch(i), backend) for i in range(count)]

    def __len__(self) -> int:
        return len(self.members)

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call `method` on all members with the same arguments. Return the results in the order of the members."""
        return self.start(method, *args, **kwargs).result()

    def call_one(self, member: int, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call `method` on one member and return the result."""
        pending = CallFutures(self)
        pending.begin(member, method, *args, **kwargs)
        return pending.result()[0]

    def start(self, method: str, *args: Any, **kwargs: Any) -> CallFutures:
        """Begin to call `method` on all members. `result()` of the returned object waits for the results."""
        return self._start("call", method, *args, **kwargs)

    def start_aside(self, method: str, *args: Any, members: Collection[int] | None = None) -> CallFutures:
        """Begin to call `method` on these members (None: on all), at the same time as other calls."""
        return self._start("aside", method, *args, members=members)

    def where(self) -> list[dict[str, Any]]:
        """Return host, node id and GPU ids of each member."""
        return self._start("where", "").result()

    def took(self, kind: str, seconds: float) -> None:
        """Note that a call of this kind has taken so long."""
        count, longest = self._durations.get(kind, (0, 0.0))
        self._durations[kind] = count + 1, max(longest, seconds)

    def longest_s(self, kind: str) -> float:
        """Return the seconds after which a call of this kind counts as hanging."""
        count, longest = self._durations.get(kind, (0, 0.0))
        is_known = count >= _KNOWN_CALLS and not kind.startswith("aside ")  # a save waits for the storage
        known = max(self.patience.hang_s, _HANG_FACTOR * longest) if is_known else float("inf")
        return min(self.patience.call_s, known)

    def write_stacks(self, reason: str) -> None:
        """Write the stacks of all members and of this process to the run directory."""
        if self.patience.run_dir is None:
            return
        directory = write_stacks(self.patience.run_dir, reason, {"driver": own_stacks(), **self.stacks()})
        if directory is not None:
            LOG.warning("the stacks of the processes are in %s", directory)

    def stacks(self) -> dict[str, str]:
        """Return the stacks of all members, by name, but not of those on lost nodes."""
        lost = self.patience.lost_nodes()
        members = [member for member in self.members if member.origin.node not in lost]
        asked = {member: self.backend.begin(member.process, "stacks", "", (), {}) for member in members}
        end = time.monotonic() + _STACKS_S
        stacks, silent = {}, {}
        for member, ticket in asked.items():
            stacks[member.name] = ""
            member.silence_s()  # the answer to its first pulse tells where it is
            if self.backend.wait([ticket], max(0.0, end - time.monotonic())):
                with contextlib.suppress(Exception):  # it has died
                    stacks[member.name] = self.backend.take(ticket, member.name)
            elif member.at is not None:
                silent[member.name] = member.at
        seen = self.backend.stacks_from_outside(list(silent.values())) if silent else []
        return {**stacks, **dict(zip(silent, seen, strict=True))}

    def end(self, member: int) -> None:
        """End the process of one member. `replace` starts another one."""
        self.members[member].end()

    def replace(self, member: int) -> None:
        """Begin to start a new process in the place of a member that has ended."""
        self.members[member] = _Member(f"{self.name} {member}", self._launch(member), self.backend)

    def kill(self) -> None:
        """End the members' processes."""
        for member in self.members:
            member.end()
        self.members = []

    def _start(
        self, channel: str, method: str, *args: Any, members: Collection[int] | None = None, **kwargs: Any
    ) -> CallFutures:
        pending = CallFutures(self, channel)
        with SIGNALS.held():  # all members get the call, or a collective would wait for those that did not
            for member in range(len(self)) if members is None else members:
                pending.begin(member, method, *args, **kwargs)
        return pending


def stacks_of(groups: Sequence[WorkerGroup]) -> dict[str, str]:
    """Return the stacks of all members of these groups, by name. A slow group does not hold up the others."""
    with ThreadPoolExecutor(max(1, len(groups))) as threads:
        return {name: text for found in threads.map(WorkerGroup.stacks, groups) for name, text in found.items()}


@dataclass(frozen=True)
class _Call:
    """A running call of one member."""

    number: int
    """The place of the member in its group."""
    member: _Member
    begun: float
    kind: str
    """Channel and method, with the names among its arguments: calls of one kind take a similar time."""


class CallFutures:
    """Running calls of members of a group. More may begin while others run.

    Args:
        channel: see `Backend.begin`. With `aside`, another thread than the loop may wait for the results; the loop
            itself handles a request to stop.
    """

    def __init__(self, group: WorkerGroup, channel: str = "call"):
        self._group = group
        self._channel = channel
        self._calls: dict[Any, _Call] = {}  # by ticket
        self._looked = time.monotonic()

    def begin(self, member: int, method: str, *args: Any, **kwargs: Any) -> None:
        """Begin to call `method` on one member."""
        group, target = self._group, self._group.members[member]
        group.patience.check_cluster()
        with SIGNALS.held():
            ticket = group.backend.begin(target.process, self._channel, method, args, kwargs)
        kind = " ".join([self._channel, method, *(name for name in args[:2] if isinstance(name, str))])
        self._calls[ticket] = _Call(member, target, time.monotonic(), kind)

    @property
    def is_running(self) -> bool:
        return bool(self._calls)

    def result(self) -> list[Any]:
        """Wait for all calls. Return the results in the order of the members (see `completed`)."""
        results = dict(self.completed())
        return [results[number] for number in sorted(results)]

    def completed(self) -> Iterator[tuple[int, Any]]:
        """Yield the member and the result of each call as it ends, until none runs.

        A failure is raised within seconds, without waiting for the other members.

        Raises:
            Exception: the exception of the member that failed, with the name of the member in a note.
            WorkerError: the process of a member died or does not answer, the call takes too long, or the cluster died.
            Stopped: a signal asks to stop, and a member does not answer.
        """
        deadline = float("inf")  # set once a member has failed
        failures: list[Exception] = []
        while self._calls and time.monotonic() < deadline:
            for number, value, error in self.poll(look=not failures):
                if error is not None:
                    failures.append(error)
                    deadline = min(deadline, time.monotonic() + _ECHO_S)
                elif not failures:
                    yield number, value
        if failures:
            raise min(failures, key=_cause_priority)

    def poll(self, timeout_s: float | None = None, look: bool = True) -> list[tuple[int, Any, Exception | None]]:
        """Wait a moment, and return the member, the result and the failure of each call that has ended.

        A call of a member that does not answer, or that takes too long, has ended with a failure, too.

        Args:
            timeout_s: how long to wait. None: half a second.
            look: check that members answer.

        Raises:
            WorkerError: the cluster died.
            Stopped: a signal asks to stop, and a member does not answer.
        """
        if not self._calls:
            return []
        outcomes: list[tuple[int, Any, Exception | None]] = []
        with SIGNALS.held():
            done = self._group.backend.wait(list(self._calls), _POLL_INTERVAL_S if timeout_s is None else timeout_s)
        if look and (not done or time.monotonic() > self._looked + _POLL_INTERVAL_S):
            overdue = dict(self._overdue({t: c for t, c in self._calls.items() if t not in done}))
            if overdue:
                with SIGNALS.held():
                    self._group.write_stacks(next(iter(overdue.values())).fact)
            for ticket, error in overdue.items():
                outcomes.append((self._calls.pop(ticket).number, None, error))
            self._looked = time.monotonic()
        for ticket in done:
            call = self._calls.pop(ticket)
            try:
                with SIGNALS.held():
                    value = self._group.backend.take(ticket, call.member.name)
            except Exception as error:
                set_origin(error, call.member.origin)
                outcomes.append((call.number, None, error))
            else:
                call.member.starts &= self._channel == "where"
                self._group.took(call.kind, time.monotonic() - call.begun)
                outcomes.append((call.number, value, None))
        return outcomes

    def forget(self, member: int) -> None:
        """Drop the calls of one member, whose process has ended."""
        self._calls = {ticket: call for ticket, call in self._calls.items() if call.number != member}

    def _overdue(self, calls: Mapping[Any, _Call]) -> Iterator[tuple[Any, WorkerError]]:
        """Check that the cluster runs. Yield the calls whose member does not answer, or that take too long."""
        patience, now = self._group.patience, time.monotonic()
        patience.check_cluster()
        lost = patience.lost_nodes()
        for ticket, call in calls.items():
            member, elapsed_s = call.member, now - call.begun
            with SIGNALS.held():
                silence_s = member.silence_s()
            if member.at and (reason := lost.get(member.at[1])):
                yield ticket, _blamed(member, f"{member} is lost with its node: {reason}", RESTART_HINT, "node")
                continue
            if silence_s > _LEAVE_S and SIGNALS.first and self._channel != "aside":
                raise Stopped(
                    f"stopped by {SIGNALS.first} while {member} did not answer: this step is not saved, the last "
                    f"checkpoint is as it was; {CONTINUES}"
                )
            if silence_s > patience.limit_s(member.starts):
                fact = f"{member} has not answered for {silence_s:.0f} s (trainer.heartbeat_timeout_s): its process or "
                yield ticket, _blamed(member, f"{fact}its machine stands still", RESTART_HINT, "silent")
            elif elapsed_s > self._group.longest_s(call.kind):
                limit = "call" if elapsed_s > patience.call_s else "hang"
                fact = f"{member}: no result after {elapsed_s:.0f} s (trainer.{limit}_timeout_s)"
                yield ticket, _blamed(member, fact, f"{RESTART_HINT}, or raise the limit", "late")
            elif silence_s > _SAY_S and not member.starts:
                member.say_silent(silence_s, patience.silence_s)
            elif member.starts and elapsed_s > _SAY_START_S:
                member.say_starting(elapsed_s, patience.call_s)


def _blamed(member: _Member, fact: str, advice: str, cause: str) -> WorkerError:
    error = WorkerError(fact, advice, cause)
    set_origin(error, member.origin)
    return error


def _cause_priority(error: Exception) -> int:
    """Return a sort key: errors of the user, exceptions of members, dead processes, broken connections."""
    if isinstance(error, UserError):
        return 0
    if isinstance(error, WorkerError):
        return 2
    return 3 if any(sign in str(error) for sign in _ECHO_SIGNS) else 1
