"""What a source of episodes is to the trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self

from trainer.episodes import Episode
from trainer.metrics.samples import Transcript


class EpisodeSource(Protocol):
    """Gives each step its episodes, and remembers which data has been trained on.

    A context manager: what it needs (engines, reward processes) is there inside, and gone afterwards.
    """

    @property
    def epoch(self) -> float:
        """Epochs of the data that committed steps have trained on, with the fraction of the current one."""
        ...

    def start(self, version: int, fresh: bool) -> None:
        """Wait until episodes can be made, with the policy's weights.

        Args:
            version: of these weights: the step that they will sample.
            fresh: the policy has the start weights of the run.
        """
        ...

    def next(self, step: int) -> list[Episode]:
        """The episodes of `step`, those of one group together. Changes nothing that is saved."""
        ...

    def describe(self, metrics: dict[str, float]) -> dict[str, float]:
        """The step's `metrics` under the names of this kind of training, and metrics of its episodes."""
        ...

    def publish(self, version: int) -> None:
        """The policy has new weights."""
        ...

    def commit(self, step: int) -> None:
        """The episodes of `step` have been trained on."""
        ...

    def evaluate(self, step: int) -> dict[str, float]:
        """Metrics of held-out data under the current policy."""
        ...

    def samples(self) -> Mapping[str, Sequence[Transcript]]:
        """Episodes of the last step and its evaluation for people to read, by the kind of data."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: Any) -> None: ...
