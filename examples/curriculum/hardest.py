"""A curriculum: from the second epoch on, leave out solved prompts and begin with those of the lowest reward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainer.data.datasets import Prompt
from trainer.seeding import permutation


def hardest_first(prompts: Sequence[Prompt], epoch: int, rewards: Mapping[int, float]) -> list[int]:
    shuffled = permutation(len(prompts), "hardest_first", epoch).tolist()  # keyed: the same after a restart
    unsolved = [place for place in shuffled if rewards.get(place, 0.0) < 1.0]
    return sorted(unsolved or shuffled, key=lambda place: rewards.get(place, 0.0))
