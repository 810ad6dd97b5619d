"""What a store does about uploads if it has one tier: nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class OneTier:
    """A store in which a commit is the end of a save (see `trainer.checkpoint.store.CheckpointStore`)."""

    def path(self, step: int) -> str:
        """Return the place of the checkpoint of a step."""
        raise NotImplementedError

    def places(self, step: int) -> list[str]:
        """Return where the checkpoint of a step may be."""
        return [self.path(step)]

    def unsafe(self) -> set[int]:
        """Return the steps that retention must not delete yet: none."""
        return set()

    def revoke(self) -> None:
        """Do nothing: a draft that is deleted loses its name first, so no other job can commit it any more."""

    def connect(self, ranks: Any) -> None:
        """Do nothing: ranks see all checkpoints."""

    def missing(self, checkpoint: Any, level: str) -> list[str]:
        """Return nothing: ranks see all files."""
        return []

    def needs_ranks(self) -> bool:
        """Return False: nothing is uploaded."""
        return False

    def start(self, fence: Callable[[], None]) -> None:
        """Do nothing: a commit is the end of a save."""

    def lag(self) -> float | None:
        """Return None: nothing is uploaded after a commit."""
        return None

    def finish(self, timeout_s: float) -> None:
        """Do nothing."""
