"""A user's curriculum."""

from __future__ import annotations


def hardest_first(prompts, epoch: int, rewards) -> list[int]:
    """A curriculum that goes by what the run has learnt."""
    return sorted(range(len(prompts)), key=lambda place: (rewards.get(place, 0.0), (7 * place + epoch) % 24))
