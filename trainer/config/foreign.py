"""Keys of verl, SkyRL and TRL, and what they are called here: `foreign.tsv`, for the error about an unknown key."""

from __future__ import annotations

import functools
import os

FILE = os.path.join(os.path.dirname(__file__), "foreign.tsv")
"""Two columns: a key, and the keys here that take its place, with a remark in brackets. A section stands for all keys
below it that have no row. The keys of TRL have no sections."""


@functools.cache
def foreign_keys() -> dict[str, str]:
    with open(FILE, encoding="utf-8") as file:
        return dict(line.rstrip("\n").split("\t") for line in file)


def counterpart_of(key: str) -> str:
    """Return what a key of another package is called here, as a clause of a sentence. Empty: no package has the key."""
    parts, known = key.split("."), foreign_keys()
    begins = (0,) if parts[0] == "environment" else (0, 1)  # people write some section before it
    names = [".".join(parts[begin:end]) for begin in begins for end in range(len(parts), begin, -1)]
    name = next((name for name in names if name in known), None)
    return f"in place of {name}, this project has {known[name]}" if name else ""
