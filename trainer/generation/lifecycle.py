"""The states of engines and of the GPU memory that they share, as pure state machines, and whose GPUs engines share.

An engine:

    STARTING --loaded--> STALE --refitted--> SERVING --stale--> STALE
    any state --died--> DEAD --replaced--> STARTING

An engine that died never serves again before it has been started, and has got the current weights. No other way leads
to SERVING.

The memory of GPUs that engines and ranks share:

    STARTING --sleep--> ASLEEP --wake--> AWAKE --sleep--> ASLEEP --start--> STARTING

Engines get weights only while they are ASLEEP, because the ranks need the memory to send them. A new engine measures
the free memory and takes its share: it starts only while the ranks have left the GPUs (STARTING or AWAKE), and sleeps
before the ranks return. AWAKE never turns into STARTING: an engine that is replaced meanwhile starts while the others
are awake.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

from trainer.errors import RESTART_HINT, WorkerError


class State(Enum):
    """The state of one engine."""

    STARTING = "starting"
    """Its process loads the model."""
    STALE = "stale"
    """It is loaded, and has other weights than the policy."""
    SERVING = "serving"
    """It has the current weights."""
    DEAD = "dead"
    """Its process has exited, or no longer answers."""


class Lifecycle:
    """The states of all engines of a run, and the version of the weights that each has.

    Every method takes the engine's number. It asserts that the transition is allowed.
    """

    def __init__(self, count: int):
        self._states = [State.STARTING] * count
        self._versions: list[int | None] = [None] * count

    def __getitem__(self, engine: int) -> State:
        return self._states[engine]

    def within(self, *states: State) -> list[int]:
        """Return the engines that are in one of these states."""
        return [engine for engine, state in enumerate(self._states) if state in states]

    def version(self, engine: int) -> int:
        """Return the version of the weights with which an engine generates."""
        version = self._versions[engine]
        assert version is not None, f"engine {engine} has no weights of the policy"
        return version

    @property
    def serving(self) -> list[int]:
        """The engines that may generate."""
        return self.within(State.SERVING)

    @property
    def loaded(self) -> list[int]:
        """The engines that can get weights."""
        return self.within(State.STALE, State.SERVING)

    def add(self) -> None:
        """One more engine starts."""
        self._versions.append(None)
        self._states.append(State.STARTING)

    def load(self, engine: int) -> None:
        """Its process has loaded the model."""
        self._move(engine, (State.STARTING,), State.STALE)

    def refit(self, engine: int, version: int) -> None:
        """It has got the current weights."""
        self._move(engine, (State.STALE, State.SERVING), State.SERVING)
        self._versions[engine] = version

    def mark_stale(self, engines: Iterable[int]) -> None:
        """The policy has other weights now than these engines."""
        for engine in engines:
            self._move(engine, (State.STALE, State.SERVING), State.STALE)

    def die(self, engine: int) -> None:
        """Its process has exited, or no longer answers."""
        self._move(engine, (State.STARTING, State.STALE, State.SERVING), State.DEAD)
        self._versions[engine] = None

    def replace(self, engine: int) -> None:
        """A new process starts in its place."""
        self._move(engine, (State.DEAD,), State.STARTING)

    def _move(self, engine: int, allowed: tuple[State, ...], state: State) -> None:
        assert self._states[engine] in allowed, f"engine {engine} is {self._states[engine].value}, not to be {state}"
        self._states[engine] = state


class Phase(Enum):
    """Who has the memory of GPUs that engines and ranks share."""

    STARTING = "starting"
    """Engines that start. The ranks hold nothing there."""
    ASLEEP = "asleep"
    """The ranks: they compute, or send weights."""
    AWAKE = "awake"
    """Engines that generate. The ranks hold nothing there."""


class GpuMemory:
    """The phases of the memory that engines and ranks share.

    Every method asserts that the transition is allowed. Engines with memory of their own are always awake.

    Args:
        shared: engines and ranks share GPUs.
    """

    def __init__(self, shared: bool):
        self.shared = shared
        self.phase = Phase.STARTING if shared else Phase.AWAKE

    @property
    def may_start(self) -> bool:
        """Whether new engines may start now."""
        return self.phase is not Phase.ASLEEP

    @property
    def may_sync(self) -> bool:
        """Whether engines may get weights now."""
        return self.phase is Phase.ASLEEP or not self.shared

    @property
    def is_awake(self) -> bool:
        return self.phase is Phase.AWAKE

    def sleep(self) -> None:
        """The engines have released their memory. The ranks may return."""
        self._move((Phase.STARTING, Phase.ASLEEP, Phase.AWAKE), Phase.ASLEEP)

    def wake(self) -> None:
        """The ranks have left, and the engines take their memory back."""
        self._move((Phase.ASLEEP,), Phase.AWAKE)

    def start(self) -> None:
        """The ranks have left, so that engines can start."""
        self._move((Phase.ASLEEP,), Phase.STARTING)

    def _move(self, allowed: tuple[Phase, ...], phase: Phase) -> None:
        assert self.shared and self.phase in allowed, f"shared memory is {self.phase.value}, not to be {phase.value}"
        self.phase = phase


Placement = Mapping[str, Any]
"""Host, node id and GPU ids of a process (see `trainer.cluster.worker_groups.WorkerGroup.placements`)."""
GpuAssignment = Sequence[Placement]
"""The ranks whose GPUs an engine shares."""


def assign_gpus(
    ranks: Sequence[Placement], assignments: Sequence[GpuAssignment | None], size: int
) -> list[GpuAssignment | None]:
    """Return the GPUs of each engine, on one node; None: no GPUs are left for it.

    An engine keeps its GPUs as long as ranks have them. The others get what is left, in their order.

    Args:
        ranks: the placements of the ranks; those of one node follow one another.
        assignments: the current ones; None: the engine has no GPUs.
        size: number of GPUs of an engine.
    """
    owners = {gpu: placement for placement in ranks for gpu in gpus_of([placement])}
    assigned: list[GpuAssignment | None] = []
    for assignment in assignments:
        gpus = gpus_of(assignment or [])
        assigned.append([owners.pop(gpu) for gpu in sorted(gpus)] if gpus and gpus <= owners.keys() else None)
    for engine in [engine for engine, assignment in enumerate(assigned) if assignment is None]:
        for node in dict.fromkeys(node for node, _ in owners):
            gpus = [gpu for gpu in owners if gpu[0] == node][:size]
            if len(gpus) == size:
                assigned[engine] = [owners.pop(gpu) for gpu in gpus]
                break
    return assigned


def colocated_ranks(assignments: Iterable[GpuAssignment], ranks: Sequence[Placement]) -> tuple[int, ...]:
    """Return the ranks that share a GPU with an engine that has one of `assignments`.

    Raises:
        WorkerError: an engine has a GPU that no rank has.
    """
    of_engines: set[tuple[str, str]] = set().union(*map(gpus_of, assignments))
    if left := of_engines - gpus_of(ranks):
        node, gpu = sorted(left)[0]
        raise WorkerError(f"an engine is on GPU {gpu} of node {node}, where no rank can give it weights", RESTART_HINT)
    return tuple(rank for rank, placement in enumerate(ranks) if gpus_of([placement]) & of_engines)


def gpus_of(placements: Iterable[Placement]) -> set[tuple[str, str]]:
    """Return the node id and the id on the node of each GPU."""
    return {(placement["node"], gpu) for placement in placements for gpu in placement["gpus"]}
