"""A user's curriculum."""

from __future__ import annotations


def hardest_first(prompts, epoch: int, rewards) -> list[int]:
    """A curriculum that goes by what the run has learnt."""
    return sorted(range(len(prompts)), key=lambda index: (rewards.get(index, 0.0), (7 * index + epoch) % 24))
