"""Which groups are under way in flight, and which of them a step trains on: no threads, no clocks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence


class Window:
    """Groups that are admitted and not trained, by numbers in the order in which their rows were drawn.

    At most `(max_staleness + 1) * batch` groups are charged at a time. A group is charged from its admission until the
    weights of the step that has trained on it are published. A step trains on the oldest groups that are finished, none
    of them more than `window - 1` numbers behind the oldest one that is left: with a window of 1, in the order of the
    numbers. So a group that is admitted while step t is the next one is trained `last_step(t)` at the latest.

    Args:
        batch: groups of a step.
        max_staleness: `rollout.max_staleness`.
        window: `rollout.window`.
    """

    def __init__(self, batch: int, max_staleness: int, window: int):
        self._batch = batch
        self._most = (max_staleness + 1) * batch
        self._window = window
        self._delay = max_staleness - (1 - window) // batch
        self._next = 0
        self._waiting: dict[int, bool] = {}  # in the order of the numbers; whether it is finished
        self._taken: list[int] = []

    @property
    def waiting(self) -> list[int]:
        """The groups that no step has taken."""
        return list(self._waiting)

    @property
    def unfinished(self) -> list[int]:
        return [number for number, is_finished in self._waiting.items() if not is_finished]

    def last_step(self, step: int) -> int:
        """Return the last step that can train on a group that is admitted while `step` is the next one."""
        return step + self._delay

    def capacity(self) -> int:
        """Return how many groups can be admitted now. Those that a step has filtered out are not charged."""
        return max(0, self._most - len(self._waiting) - min(len(self._taken), self._batch))

    def admit(self, count: int) -> list[int]:
        """Admit groups; return their numbers."""
        numbers = list(range(self._next, self._next + count))
        self._waiting |= dict.fromkeys(numbers, False)
        self._next += count
        return numbers

    def finish(self, number: int) -> None:
        """Note that all of a group is there."""
        assert not self._waiting[number]
        self._waiting[number] = True

    def take(self, count: int) -> list[int] | None:
        """Take the next `count` groups to train on. None: they are not finished yet."""
        chosen = self._choose(count, lambda number: self._waiting[number])
        for number in chosen or ():
            del self._waiting[number]
        self._taken += chosen or ()
        return chosen

    def can_take_without(self, missing: Collection[int], count: int) -> bool:
        """Return whether `take` would find `count` groups if all but the missing ones were finished."""
        return self._choose(count, lambda number: number not in missing) is not None

    def _choose(self, count: int, is_usable: Callable[[int], bool]) -> list[int] | None:
        left, chosen = list(self._waiting), []
        while len(chosen) < count:
            inside = itertools.takewhile(lambda number: number < left[0] + self._window, left)
            number = next(filter(is_usable, inside), None)
            if number is None:
                return None
            chosen.append(number)
            left.remove(number)
        return chosen

    def can_take(self, numbers: Sequence[int]) -> bool:
        """Return whether a step may take these groups, in this order, once they are finished."""
        left = list(self._waiting)
        for number in numbers:
            if number not in left or number >= left[0] + self._window:
                return False
            left.remove(number)
        return True

    def take_those(self, numbers: Sequence[int]) -> list[int] | None:
        """Take these groups, of which `can_take` says that a step may. None: they are not finished yet."""
        if not all(self._waiting[number] for number in numbers):
            return None
        for number in numbers:
            del self._waiting[number]
        self._taken += numbers
        return list(numbers)

    def reach(self, count: int) -> list[int]:
        """Return the groups of which the next `count` will be some: those that no step has taken."""
        waiting = list(self._waiting)
        if len(waiting) <= count:
            return waiting
        return [number for number in waiting if number < waiting[count - 1] + self._window]

    def give_back(self, numbers: Sequence[int]) -> None:
        """Return finished groups that the step has taken and does not need."""
        self._taken = [number for number in self._taken if number not in numbers]
        self._waiting = dict(sorted({**self._waiting, **dict.fromkeys(numbers, True)}.items()))

    def publish(self) -> None:
        """Free the groups that were taken: the weights of their step are published."""
        self._taken.clear()
