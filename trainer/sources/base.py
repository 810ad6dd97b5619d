"""What a source of episodes, and an evaluator, are to the trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from trainer.checkpoint.components import Component
from trainer.episodes import Episode


class EpisodeSource(Protocol):
    """Returns the episodes of each step, and remembers which data has been trained on.

    A context manager: the processes that it needs (engines, reward processes) run inside, and have ended afterwards.
    """

    @property
    def repeats(self) -> bool:
        """Whether a resumed run gets the episodes of a step again bit for bit. Else chance may change them."""
        ...

    @property
    def epoch(self) -> float:
        """Epochs of the data that committed steps have trained on, with the fraction of the current one."""
        ...

    def start(self, version: int, is_initial: bool) -> None:
        """Wait until episodes can be made, with the policy's weights.

        Args:
            version: of these weights: the step that they will sample.
            is_initial: these are the initial weights of the run.
        """
        ...

    def next(self, step: int) -> list[Episode]:
        """Return the episodes of `step`, those of one group together. Changes nothing that is saved."""
        ...

    def add_metrics(self, step: int, metrics: dict[str, float]) -> dict[str, float]:
        """Return the metrics of `step` with those of its episodes. Called before `commit`."""
        ...

    def publish(self, version: int) -> None:
        """Sample with the policy's new weights from now on. Waits for what is still sampled with the old ones."""
        ...

    def commit(self, step: int) -> None:
        """Record that the episodes of `step` have been trained on. Called after `publish`: steps ahead may begin."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def components(self) -> Sequence[Component]:
        """Return what a checkpoint holds of this source besides `state_dict`, such as finished episodes of steps ahead.

        Called once. A resume loads `state_dict` first, then the components. Only `load_state_dict` is called where a
        run begins again without a checkpoint: it must drop what the components hold.
        """
        return ()

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: Any) -> None: ...


@dataclass(frozen=True)
class Evaluation:
    """The result of one evaluation."""

    metrics: dict[str, float]
    greedy: Sequence[Episode] = ()
    """One episode for each prompt, decoded greedily. Empty: nothing was generated."""
    sampled: Sequence[Episode] = ()  # episodes for pass@k
    sets: Mapping[str, Sequence[Episode]] = field(default_factory=dict)
    """The episodes of named sets."""


class Evaluator(Protocol):
    """Measures the current policy on validation data."""

    def evaluate(self, step: int) -> Evaluation: ...
