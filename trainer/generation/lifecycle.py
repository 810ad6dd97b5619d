"""The states of engines, from start to death, as a pure state machine: no processes, no clocks.

    STARTING --loaded--> STALE --refitted--> SERVING --outdated--> STALE
    any state --died--> DEAD --replaced--> STARTING

An engine that died never serves again before it has been started, and has got the current weights. No other way leads
to SERVING.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum


class State(Enum):
    """The state of one engine."""

    STARTING = "starting"
    """Its process loads the model."""
    STALE = "stale"
    """It is loaded, and has other weights than the policy."""
    SERVING = "serving"
    """It has the current weights."""
    DEAD = "dead"
    """Its process is gone, or no longer answers."""


class Lifecycle:
    """The states of all engines of a run.

    Every method takes the engine's number. It asserts that the transition is allowed.
    """

    def __init__(self, count: int):
        self._states = [State.STARTING] * count

    def __getitem__(self, engine: int) -> State:
        return self._states[engine]

    def within(self, *states: State) -> list[int]:
        """Return the engines that are in one of these states."""
        return [engine for engine, state in enumerate(self._states) if state in states]

    @property
    def serving(self) -> list[int]:
        """The engines that may generate."""
        return self.within(State.SERVING)

    @property
    def loaded(self) -> list[int]:
        """The engines that can get weights."""
        return self.within(State.STALE, State.SERVING)

    def load(self, engine: int) -> None:
        """Its process has loaded the model."""
        self._move(engine, (State.STARTING,), State.STALE)

    def refit(self, engine: int) -> None:
        """It has got the current weights."""
        self._move(engine, (State.STALE, State.SERVING), State.SERVING)

    def outdate(self, engines: Iterable[int]) -> None:
        """The policy has other weights now than these engines."""
        for engine in engines:
            self._move(engine, (State.STALE, State.SERVING), State.STALE)

    def die(self, engine: int) -> None:
        """Its process is gone, or no longer answers."""
        self._move(engine, (State.STARTING, State.STALE, State.SERVING), State.DEAD)

    def replace(self, engine: int) -> None:
        """A new process starts in its place."""
        self._move(engine, (State.DEAD,), State.STARTING)

    def _move(self, engine: int, allowed: tuple[State, ...], state: State) -> None:
        assert self._states[engine] in allowed, f"engine {engine} is {self._states[engine].value}, not to be {state}"
        self._states[engine] = state
