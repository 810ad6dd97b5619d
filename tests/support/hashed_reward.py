"""A user's reward that differs between any two completions, and so gives even random models something to learn."""

from __future__ import annotations

import json
import os
import zlib


def hashed(completion: str, answer: str) -> float:
    """A number in [0, 1) that depends on every letter. The file that `TEST_CALLS` names gets a line for each call."""
    if path := os.environ.get("TEST_CALLS"):
        with open(path, "a") as file:
            file.write(json.dumps([completion, answer]) + "\n")
    return zlib.crc32(f"{completion} {answer}".encode()) / 2**32
