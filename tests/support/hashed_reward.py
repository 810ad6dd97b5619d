"""A user's reward that differs between any two completions, and so gives even random models something to learn."""

from __future__ import annotations

import zlib


def hashed(completion: str, answer: str) -> float:
    """A number in [0, 1) that depends on every letter."""
    return zlib.crc32(f"{completion} {answer}".encode()) / 2**32
