"""The rewards that a run has got, by content, so that a replay after a kill gets the same ones again."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Mapping
from typing import Any

import xxhash

from trainer.documents import is_number, parse_object
from trainer.redaction import redact
from trainer.rewards.values import Parts

STORE_FILE = "rewards.jsonl"

Result = list[Parts | str]
"""For each completion of a call: the parts of its reward, or the reason why it has none."""


def key_of(reward: str, given: Mapping[str, Any]) -> str:
    """Return the key of one call: a hash of the reward (a URL or an import path) and of all that it gets.

    Credentials in the URL have no part in it: nobody can guess them from the key, and new ones ask for nothing again.
    """
    content = json.dumps([redact(reward, references=False), given], sort_keys=True, default=str)
    return xxhash.xxh3_128_hexdigest(content.encode())


class RewardStore:
    """The file `{run_dir}/rewards.jsonl`: a line for each call. Lines are only appended.

    A call that has succeeded is never repeated. One that has failed is not repeated when its step is replayed, and is
    tried again in other steps.

    Args:
        fence: raises when this process no longer holds the run directory; then nothing is written there.
    """

    def __init__(self, run_dir: str, fence: Callable[[], None] = lambda: None):
        self._path = os.path.join(run_dir, STORE_FILE)
        self._fence = fence
        self._known: dict[str, Result] | None = None

    def find(self, key: str, step: str) -> Result | None:
        """Return the result of the call, if it is known for this step."""
        known = self._load()
        return known.get(key) or known.get(f"{key} {step}")

    def add(self, results: Mapping[str, Result], step: str) -> None:
        """Add results, and wait until they are on the disk."""
        lines = []
        for key, result in results.items():
            name = f"{key} {step}" if any(isinstance(parts, str) for parts in result) else key
            self._load()[name] = result
            lines.append(json.dumps({"key": name, "rewards": result}) + "\n")
        if not lines:
            return
        self._fence()
        # Private: what a server has said, and what completions are worth, is for the user alone.
        with open(self._path, "ab", opener=_open_private) as file:
            os.fchmod(file.fileno(), stat.S_IRUSR | stat.S_IWUSR)  # earlier versions made it readable for everybody
            file.write("".join(lines).encode())
            file.flush()
            os.fsync(file.fileno())

    def _load(self) -> dict[str, Result]:
        if self._known is None:
            self._known = {}
            if os.path.exists(self._path):
                self._fence()
                with open(self._path, "r+b") as file:
                    data = file.read()
                    whole = data.rfind(b"\n") + 1
                    file.truncate(whole)  # a kill may have torn the last line
                self._known.update(filter(None, map(_read_line, data[:whole].splitlines())))
        return self._known


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, stat.S_IRUSR | stat.S_IWUSR)


def _read_line(line: bytes) -> tuple[str, Result] | None:
    """Return key and result; None if the line is damaged."""
    try:
        document = parse_object(line, {"key": str, "rewards": [({str: is_number}, str)]})
    except ValueError:
        return None
    return document["key"], document["rewards"]
