"""Groups in flight: which are under way, and which a step trains on. No coroutines, no clocks.

A group:

    RUNNING --finished--> FINISHED --taken--> TAKEN --trained--> (forgotten)
    TAKEN --given back--> FINISHED

Steps take groups in the order in which their rows were drawn, and only FINISHED ones: no group is taken twice before it
is given back, none is trained that was not taken, and none passes another that is still RUNNING.

A group is charged from its admission until the weights of the step that has trained on it are published. At most
`(max_staleness + 1) * batch` groups are charged at a time. So one that is admitted while step t is the next one is
trained in step `t + max_staleness` at the latest.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum


class GroupState(Enum):
    """The state of one group."""

    RUNNING = "running"
    """Its episodes are sampled, or it waits for the weights of a record."""
    FINISHED = "finished"
    """All of it is there."""
    TAKEN = "taken"
    """A step uses it up: the step trains on it, or has filtered it out."""


class Flight:
    """The states of the groups that are admitted and not committed, by numbers in the order of their rows.

    Args:
        batch: groups of a step.
        max_staleness: `rollout.max_staleness`.
    """

    def __init__(self, batch: int, max_staleness: int):
        self._batch = batch
        self._most = (max_staleness + 1) * batch
        self._next = 0
        self._states: dict[int, GroupState] = {}
        self._charged: set[int] = set()  # groups that are taken, and whose weights are not published

    def within(self, *states: GroupState) -> list[int]:
        """Return the groups in one of these states."""
        return [number for number, state in self._states.items() if state in states]

    @property
    def untaken(self) -> list[int]:
        return self.within(GroupState.RUNNING, GroupState.FINISHED)

    def capacity(self) -> int:
        """Return how many groups can be admitted now. Those that a step has filtered out are not charged."""
        return max(0, self._most - len(self.untaken) - min(len(self._charged), self._batch))

    def admit(self, count: int) -> list[int]:
        """Admit groups; return their numbers."""
        numbers = list(range(self._next, self._next + count))
        self._states |= dict.fromkeys(numbers, GroupState.RUNNING)
        self._next += count
        return numbers

    def finish(self, number: int) -> None:
        """All of the group is there."""
        self._move([number], GroupState.RUNNING, GroupState.FINISHED)

    def take(self, count: int) -> list[int] | None:
        """Take the next `count` groups. None: they are not there, or not finished."""
        chosen = self.untaken[:count]
        if len(chosen) < count or any(self._states[number] is not GroupState.FINISHED for number in chosen):
            return None
        self._move(chosen, GroupState.FINISHED, GroupState.TAKEN)
        self._charged.update(chosen)
        return chosen

    def give_back(self, numbers: Iterable[int]) -> None:
        """The step does not need these groups: another one takes them."""
        numbers = list(numbers)
        self._move(numbers, GroupState.TAKEN, GroupState.FINISHED)
        self._charged.difference_update(numbers)

    def publish(self) -> None:
        """The weights of the step that has taken groups are published."""
        self._charged.clear()

    def forget(self, numbers: Iterable[int]) -> None:
        """The step that has taken these groups is committed."""
        for number in numbers:
            assert self._states.pop(number) is GroupState.TAKEN, f"group {number} was not taken"

    def _move(self, numbers: Iterable[int], before: GroupState, after: GroupState) -> None:
        for number in numbers:
            state = self._states[number]
            assert state is before, f"group {number} is {state.value}, not to be {after.value}"
            self._states[number] = after
