"""Choose the groups of completions that a step trains on (DAPO, https://arxiv.org/abs/2503.14476)."""

from __future__ import annotations

import numpy as np


def choose_groups(rewards: np.ndarray, wanted: int, complete: bool) -> tuple[list[int], int] | None:
    """Choose the first `wanted` groups that teach something, of those sampled so far.

    Args:
        rewards: `(P, n)`, NaN where a reward failed.
        complete: no more will be sampled: fill up with the first of the others.

    Returns:
        the indices of the chosen groups, ascending, and how many groups are used up: all up to the last one that was
        looked at. None when more must be sampled.
    """
    informative = np.flatnonzero(have_different_rewards(rewards))[:wanted].tolist()
    if len(informative) == wanted:
        return informative, informative[-1] + 1
    if not complete:
        return None
    others = [i for i in range(len(rewards)) if i not in set(informative)]
    return sorted(informative + others[: wanted - len(informative)]), len(rewards)


def have_different_rewards(rewards: np.ndarray) -> np.ndarray:
    """Return `(P,)`, true where at least two of the rewards `(P, n)` that did not fail (not NaN) differ."""
    failed = np.isnan(rewards)
    return np.where(failed, -np.inf, rewards).max(axis=1) > np.where(failed, np.inf, rewards).min(axis=1)
