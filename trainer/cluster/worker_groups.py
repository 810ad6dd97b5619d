"""Groups of worker processes that are called together and fail together. Ray or `ProcessCluster` starts them."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from trainer.cluster.resources import FindGpus
from trainer.errors import (
    RESTART_HINT,
    FailureSource,
    UserError,
    WorkerError,
    is_out_of_memory,
    one_line,
    set_failure_source,
)
from trainer.process import time_limits
from trainer.process.log_setup import guard_output, show_messages
from trainer.process.network import use_network_of
from trainer.process.signals import CONTINUES, SIGNALS, Stopped
from trainer.process.tracing import TRACER, WANTED

LOG = logging.getLogger(__name__)

# When a rank dies, its connections close, so the other ranks fail too. Their errors may arrive first. The user should
# read the cause and not its effects.
_ECHO_SIGNS = ("Connection closed", "Connection reset", "gloo", "NCCL", "recvBytes", "process group")


@dataclass(frozen=True)
class Timeouts:
    """How long the driver waits for processes."""

    heartbeat_s: float  # age of a heartbeat, in seconds, after which a process counts as dead
    rpc_s: float  # longest duration of one call, in seconds
    failed_process: Callable[[], str | None] = lambda: None
    """Returns the name of a process of the cluster that has died, or None if all run."""
    failed_nodes: Callable[[], Mapping[str, str]] = dict
    """Returns the addresses of failed nodes, each with the reason."""

    def heartbeat_limit_s(self, is_starting: bool) -> float:
        """Return the age of a heartbeat, in seconds, after which a process counts as dead."""
        return max(self.heartbeat_s, time_limits.IMPORTS_S) if is_starting else self.heartbeat_s

    def check_cluster(self) -> None:
        """Raise a `WorkerError` if a process of the cluster has died: a call of Ray could hang or end this process."""
        if process := self.failed_process():
            raise WorkerError(f"{process} died, and the job with it", "restart it with the same command", "cluster")


class Cluster(AbstractContextManager):
    """Starts the worker groups of a job: `ray_cluster.RayCluster`, or one that uses this machine alone. A context
    manager: no process outlives the block."""

    device: str  # `cuda` or `cpu`
    object_store_bytes = 0  # shared memory that stored values may use, in bytes
    is_local = True  # all processes are on this machine, so that ranks meet at a file

    @abstractmethod
    def count_ranks(self) -> int:
        """Return how many ranks to start: `trainer.num_workers`, or fewer if the cluster has too little capacity."""

    @abstractmethod
    def launch_ranks(self, name: str, factory: Any, env: dict[str, str], count: int | None = None) -> WorkerGroup:
        """Start `count` processes (None: `trainer.num_workers`) that host `factory(rank, world_size, device)`, each
        with a GPU or a CPU. Does not wait."""

    @abstractmethod
    def launch_engines(
        self, factory: Any, args: Sequence[tuple], env: dict[str, str], find_gpus: FindGpus | None = None
    ) -> WorkerGroup:
        """Start a process for each of `args`, which hosts `factory(*args)`. Does not wait. `find_gpus` returns the
        ranks whose GPUs an engine uses. None: engines have their own GPUs."""

    def has_capacity(self, group: WorkerGroup) -> bool:
        """Return whether at least one worker of `group` is scheduled. After a node failure it may have to wait."""
        return True  # workers on one machine keep their resources

    @abstractmethod
    def put(self, value: Any) -> Any:
        """Store a copy of `value` and return a reference. In a call, workers receive the value instead."""

    @abstractmethod
    def rendezvous_address(self, group: WorkerGroup) -> str:
        """Return the address at which the ranks of a process group meet: a port of rank 0's machine, or a file if all
        ranks are on this machine. Rank 0 of `group` is rank 0 of that group."""

    @abstractmethod
    def release(self, group: WorkerGroup) -> None:
        """Kill the processes of the group, wait until they have exited, and free their resources."""

    def drain(self, error: Exception) -> None:  # noqa: B027 - with one node there is no other
        """Place no process on the node of a broken GPU that has caused a worker's `error`."""


class Backend(Protocol):
    """Sends calls to the processes of a cluster. A ticket stands for one running call."""

    def begin(self, process: Any, channel: str, method: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Begin a call and return its ticket. Calls on different channels run at the same time.

        Args:
            channel: `call` and `background` run `method` of the hosted object. `heartbeat` also answers during a call
                and while the object is built. It returns `pid`, `host` (the address of the node), `node` (its id),
                `gpus` (their ids) and `is_built`.
        """

    def wait(self, tickets: list[Any], timeout_s: float) -> list[Any]:
        """Wait at most `timeout_s` until a call is done. Return the tickets of the calls that are done."""

    def get(self, ticket: Any, name: str) -> Any:
        """Return the result of a call that is done, or raise the exception that the user should see."""

    def has_started(self, process: Any) -> bool:
        """Return whether the process has been started. Before that, it may wait for capacity."""

    def kill(self, process: Any, process_id: tuple[int, str] | None) -> None:
        """Kill the process, even if it is stopped. `process_id`: pid and address of the node, if they are known."""


class _Worker:
    """One process, and whether it still answers. Thread-safe: the training loop and the saving thread both use it."""

    def __init__(self, name: str, process: Any, backend: Backend):
        self.name = name
        self.process = process
        self.backend = backend
        self._heartbeat, self._sent_at = backend.begin(process, "heartbeat", "", (), {}), time.monotonic()
        self.process_id: tuple[int, str] | None = None
        """Pid and address of the node, once the process has answered."""
        self.is_starting = True  # whether the object may still be under construction
        self.is_late = False  # a warning has said that it has not answered for some time
        self._lock = threading.Lock()

    def __str__(self) -> str:
        return f"{self.name} (process {self.process_id[0]} on {self.process_id[1]})" if self.process_id else self.name

    @property
    def failure_source(self) -> FailureSource:
        return FailureSource(self.name, self.process_id[1] if self.process_id else "")

    def heartbeat_age_s(self) -> float:
        """Return how long a heartbeat has waited for its answer, in seconds; 0 while the process is not scheduled."""
        with self._lock:
            now = time.monotonic()
            if self._heartbeat is not None and self.backend.wait([self._heartbeat], 0):
                with contextlib.suppress(Exception):  # it died: the running call raises the reason
                    answer = self.backend.get(self._heartbeat, self.name)
                    self.process_id = answer["pid"], answer["host"]
                    self.is_starting &= not answer["is_built"]  # this answer may be older than the end of the build
                    if self.is_late:
                        LOG.warning("%s answers again", self)
                self._heartbeat, self.is_late = None, False
            if self._heartbeat is None and now - self._sent_at > time_limits.HEARTBEAT_INTERVAL_S:
                self._heartbeat = self.backend.begin(self.process, "heartbeat", "", (), {})
                self._sent_at = now
            if self.process_id is None and not self.backend.has_started(self.process):
                self._sent_at = now
            return now - self._sent_at if self._heartbeat is not None else 0.0

    def end(self) -> None:
        self.heartbeat_age_s()  # the answer to the first heartbeat contains the process id
        self.backend.kill(self.process, self.process_id)


class WorkerGroup:
    """Processes with the same role. A call goes to all workers, and the cause of a failure is raised unchanged.

    Args:
        name: name of a worker in messages, before its index.
        launch: begins to start the process of a worker, by its index. Returns the process as `backend` uses it.
    """

    def __init__(self, name: str, count: int, launch: Callable[[int], Any], backend: Backend, timeouts: Timeouts):
        self.name = name
        self.backend = backend
        self.timeouts = timeouts
        self._launch = launch
        self.workers = [_Worker(f"{name} {i}", launch(i), backend) for i in range(count)]

    def __len__(self) -> int:
        return len(self.workers)

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call `method` on all workers with the same arguments. Return the results in the order of the workers."""
        return self.start(method, *args, **kwargs).result()

    def call_each(self, method: str, args: Sequence[tuple]) -> list[Any]:
        """Call `method` on all workers, each with its own arguments. Return the results in the order of the workers."""
        return self._start("call", method, dict(enumerate(args))).result()

    def call_one(self, worker: int, method: str, *args: Any, **kwargs: Any) -> Any:
        futures = CallFutures(self)
        futures.begin(worker, method, *args, **kwargs)
        return futures.result()[0]

    def start(self, method: str, *args: Any, **kwargs: Any) -> CallFutures:
        """Begin to call `method` on all workers. `result()` of the returned object waits for the results."""
        return self._start("call", method, dict.fromkeys(range(len(self)), args), **kwargs)

    def start_background(self, method: str, *args: Any, workers: Collection[int] | None = None) -> CallFutures:
        """Begin to call `method` on these workers (None: on all), while other calls run."""
        return self._start("background", method, dict.fromkeys(range(len(self)) if workers is None else workers, args))

    def placements(self) -> list[dict[str, Any]]:
        """Return host, node id and GPU ids of each worker, among what heartbeats tell."""
        return self._start("heartbeat", "", dict.fromkeys(range(len(self)), ())).result()

    def end(self, worker: int) -> None:
        """Kill the process of one worker. `replace` starts another one."""
        self.workers[worker].end()

    def replace(self, worker: int) -> None:
        """Begin to start a new process for a worker whose process has exited."""
        self.workers[worker] = _Worker(f"{self.name} {worker}", self._launch(worker), self.backend)

    def admit(self, worker: int, name: str, process: Any, backend: Backend) -> None:
        """Take in a process that another backend has: in the place of this worker, or after the last one."""
        self.workers[worker : worker + 1] = [_Worker(name, process, backend)]

    def kill(self) -> None:
        for worker in self.workers:
            worker.end()
        self.workers = []

    def _start(self, channel: str, method: str, args: Mapping[int, tuple], **kwargs: Any) -> CallFutures:
        futures = CallFutures(self, channel)
        with SIGNALS.deferred():  # if only some workers got the call, a collective would wait for the others
            for worker, own in args.items():
                futures.begin(worker, method, *own, **kwargs)
        return futures


@dataclass(frozen=True)
class _Call:
    """A running call of one worker."""

    index: int  # index of the worker in its group
    worker: _Worker
    started_at: float


class CallFutures:
    """Running calls of workers of a group. More calls may begin while others run. On the channel `background`, a thread
    other than the training loop may wait for the results: the loop itself handles stop requests."""

    def __init__(self, group: WorkerGroup, channel: str = "call"):
        self._group = group
        self._channel = channel
        self._calls: dict[Any, _Call] = {}  # by ticket
        self._health_checked_at = time.monotonic()

    def begin(self, worker: int, method: str, *args: Any, **kwargs: Any) -> None:
        group, target = self._group, self._group.workers[worker]
        group.timeouts.check_cluster()
        spans = {WANTED: True} if TRACER.is_on and self._channel in ("call", "background") else {}
        started_at = time.monotonic()
        with SIGNALS.deferred():
            ticket = target.backend.begin(target.process, self._channel, method, args, kwargs | spans)
        self._calls[ticket] = _Call(worker, target, started_at)

    @property
    def is_running(self) -> bool:
        return bool(self._calls)

    def result(self) -> list[Any]:
        """Wait for all calls. Return the results in the order of the workers (see `completed`)."""
        results = dict(self.completed())
        return [results[index] for index in sorted(results)]

    def completed(self) -> Iterator[tuple[int, Any]]:
        """Yield the index of the worker and the result of each call as it ends. A failure is raised within seconds.

        Raises:
            Exception: the exception of the worker that failed, with the name of the worker in a note.
            WorkerError: a worker died or does not answer, a call takes too long, or the cluster failed.
            Stopped: a signal requests a stop, and a worker does not answer.
        """
        deadline = float("inf")  # set once a worker has failed
        failures: list[Exception] = []
        while self._calls and time.monotonic() < deadline:
            for index, value, error in self.poll(check_health=not failures):
                if error is None:
                    if not failures:
                        yield index, value
                else:
                    failures.append(error)
                    deadline = min(deadline, time.monotonic() + time_limits.ECHO_S)
        if failures:
            raise min(failures, key=_cause_priority)

    def poll(
        self, timeout_s: float | None = None, check_health: bool = True
    ) -> list[tuple[int, Any, Exception | None]]:
        """Wait briefly. Return the index of the worker, the result and the failure of each call that has ended. A call
        whose worker does not answer (if that is checked), or that takes too long, ends with a failure.

        Raises:
            WorkerError: the cluster failed.
            Stopped: a signal requests a stop, and a worker does not answer.
        """
        if not self._calls:
            return []
        outcomes: list[tuple[int, Any, Exception | None]] = []
        with SIGNALS.deferred():
            done = self._wait(time_limits.POLL_INTERVAL_S if timeout_s is None else timeout_s)
        if check_health and (not done or time.monotonic() > self._health_checked_at + time_limits.POLL_INTERVAL_S):
            for ticket, message, cause in list(self._find_overdue(set(done))):
                call = self._calls.pop(ticket)
                error = WorkerError(message, RESTART_HINT, cause)
                set_failure_source(error, call.worker.failure_source)
                outcomes.append((call.index, None, error))
            self._health_checked_at = time.monotonic()
        for ticket in done:
            call = self._calls.pop(ticket)
            try:
                with SIGNALS.deferred():
                    answer = call.worker.backend.get(ticket, call.worker.name)
                    value = TRACER.receive(call.worker.name, answer)
            except Exception as error:
                set_failure_source(error, call.worker.failure_source)
                outcomes.append((call.index, None, error))
            else:
                call.worker.is_starting &= self._channel == "heartbeat"
                outcomes.append((call.index, value, None))
        return outcomes

    def _wait(self, timeout_s: float) -> list[Any]:
        """Wait until a call is done, at most so long; return the tickets of those that are."""
        tickets: dict[Any, list[Any]] = {}  # by backend
        for ticket, call in self._calls.items():
            tickets.setdefault(call.worker.backend, []).append(ticket)
        done: list[Any] = []
        for backend, own in tickets.items():
            done += backend.wait(own, 0 if done else timeout_s / len(tickets))
        return done

    def drop_calls(self, worker: int) -> None:
        self._calls = {ticket: call for ticket, call in self._calls.items() if call.index != worker}

    def _find_overdue(self, done: Collection[Any]) -> Iterator[tuple[Any, str, str]]:
        """Check that the cluster runs. Yield the calls but `done` whose worker does not answer, or that take too long,
        with what has happened and its cause."""
        timeouts, now = self._group.timeouts, time.monotonic()
        timeouts.check_cluster()
        failed = timeouts.failed_nodes()
        for ticket, call in self._calls.items():
            if ticket in done:
                continue
            worker, elapsed_s = call.worker, now - call.started_at
            with SIGNALS.deferred():
                heartbeat_age_s = worker.heartbeat_age_s()
            if worker.process_id and (reason := failed.get(worker.process_id[1])):
                yield ticket, f"{worker} failed with its node: {reason}", "node"
                continue
            if heartbeat_age_s > time_limits.STOP_WAIT_S and SIGNALS.first and self._channel != "background":
                raise Stopped(
                    f"stopped by {SIGNALS.first} while {worker} did not answer: this step is not saved, the last "
                    f"checkpoint is unchanged; {CONTINUES}"
                )
            if heartbeat_age_s > timeouts.heartbeat_limit_s(worker.is_starting):
                message = f"{worker} has not answered for {heartbeat_age_s:.0f} s: its process or its machine hangs"
                yield ticket, message, "heartbeat_timeout"
            elif elapsed_s > timeouts.rpc_s:
                yield ticket, f"{worker}: no result after {elapsed_s:.0f} s", "rpc_timeout"
            elif heartbeat_age_s > time_limits.HEARTBEAT_WARNING_S and not (worker.is_starting or worker.is_late):
                worker.is_late, text = True, "%s has not answered for %.0f s; after %g s it counts as dead"
                LOG.warning(text, worker, heartbeat_age_s, timeouts.heartbeat_s)


def _cause_priority(error: Exception) -> int:
    """Return a sort key: errors of the user, exceptions of workers, dead processes, broken connections."""
    if isinstance(error, UserError):
        return 0
    if isinstance(error, WorkerError):
        return 2
    return 3 if any(sign in str(error) for sign in _ECHO_SIGNS) else 1


def prepare_process(address: str) -> None:
    """Prepare this process to host a worker on the node with `address`: failed writes to stdout or stderr do not end
    it, and process groups use the network interface with `address`, unless the user has chosen another one."""
    guard_output()  # user functions print too
    show_messages()
    use_network_of(address, os.environ)


def failure_of(cause: BaseException, name: str, trace: str) -> Exception:
    """Return the exception that the driver raises for `cause`, which the worker `name` raised with this traceback."""
    if isinstance(cause, UserError):
        return cause
    if not isinstance(cause, Exception):
        return WorkerError(f"{name} failed: {trace}")
    if is_out_of_memory(cause):
        return WorkerError(
            f"{name} has no memory left ({one_line(str(cause)) or 'MemoryError'})",
            "lower trainer.max_tokens_per_micro_batch, rollout.max_num_seqs or (on shared GPUs) "
            f"rollout.gpu_memory_utilization, or use more devices, and {RESTART_HINT}",
            "memory",
        )
    cause.add_note(f"in {name}; its own traceback:\n{trace}")
    return cause
