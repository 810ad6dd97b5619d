"""The protocol of a scorer: what gives rewards to the episodes of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, Self

from trainer.rewards.parsing import Terms
from trainer.rewards.scores import Scores
from trainer.rewards.terms import RewardInput


class Scoring(Protocol):
    """The rewards of some episodes, while they are computed."""

    def add(self, first: int, inputs: Sequence[RewardInput]) -> None:
        """Begin to score episodes that have ended. Others are still generated.

        Args:
            first: index of the first one.
            inputs: whole groups, one after another. Their `episode` has the tokens.
        """
        ...

    def finished(self) -> Mapping[int, tuple[float, Terms, str]]:
        """Return reward, terms and the reason of a failure of each episode whose reward is known so far, by its index.

        Groups of these are recorded before the others end. A scorer that knows none before `scores` returns nothing.
        """
        ...

    def scores(self, meanwhile: Callable[[], None]) -> Scores:
        """Wait for the rewards of all episodes; return them in the order of the indices.

        Args:
            meanwhile: may be called again and again while this waits. It calls `finished`.
        """
        ...


class Scorer(Protocol):
    """Gives rewards to episodes. A task builds it; `trainer.rewards.scoring.RewardPool` calls reward functions.

    A context manager: the processes that it needs run inside.
    """

    @property
    def uses_ranks(self) -> bool:
        """Whether `Scoring.scores` computes on the ranks. Then engines that share their GPUs sleep meanwhile."""
        ...

    def scoring(self, n: int, purpose: str, known: int) -> AbstractContextManager[Scoring]:
        """Score the episodes that are added in the block.

        Args:
            n: episodes in a group.
            purpose: names what the rewards are for, in messages.
            known: further episodes of the step, whose rewards are known and have not failed.
        """
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: Any) -> None: ...
