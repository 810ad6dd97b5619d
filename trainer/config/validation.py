"""When validation is due."""

from __future__ import annotations


def is_due(interval: int, step: int, total_steps: int) -> bool:
    """Return whether validation that takes place every `interval` steps (-1: never), and after the last one, is due."""
    return interval > 0 and (step % interval == 0 or step == total_steps)
