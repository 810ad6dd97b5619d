"""The cache of the rewards of a run, by content, so that a replay after a kill gets the same rewards."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

import xxhash

from trainer.files.appended import AppendedFile
from trainer.files.atomic_io import read_file
from trainer.files.documents import is_number, parse_object
from trainer.files.redaction import redact
from trainer.rewards.parsing import Terms

CACHE_FILE = "rewards.jsonl"

Result = list[Terms | str]
"""For each completion of a call: the terms of its reward, or the reason why it has none."""


def key_of(reward: str, given: Mapping[str, Any]) -> str:
    """Return the key of one call: a hash of the reward (a URL or an import path) and its arguments.

    Credentials in the URL are left out: the key does not reveal them, and new credentials repeat no call.
    """
    content = json.dumps([redact(reward, references=False), given], sort_keys=True, default=str)
    return xxhash.xxh3_128_hexdigest(content.encode())


class RewardCache:
    """The file `{run_dir}/rewards.jsonl`: a line for each call. Lines are only appended. Any thread may use it.

    A call that has succeeded is never repeated. One that has failed is not repeated when its step is replayed, and is
    tried again in other steps.

    Args:
        fence: raises when this process no longer holds the run directory; then nothing is written there.
    """

    def __init__(self, run_dir: str, fence: Callable[[], None] = lambda: None):
        self._path = os.path.join(run_dir, CACHE_FILE)
        self._fence = fence
        self._file = AppendedFile(self._path, fence, mode=0o600)  # a server's answers are for the user alone
        self._known: dict[str, Result] | None = None
        self._lock = threading.Lock()

    def find(self, key: str, step: str) -> Result | None:
        """Return the result of the call, if it is known for this step."""
        with self._lock:
            known = self._load()
            return known.get(f"{key} {step}") or known.get(key)  # it may have succeeded in a later step, before a kill

    def add(self, results: Mapping[str, Result], step: str) -> None:
        """Add results, and wait until they are on the disk. If it is full, they wait in memory for room."""
        with self._lock:
            lines = []
            for key, result in results.items():
                name = f"{key} {step}" if any(isinstance(terms, str) for terms in result) else key
                self._load()[name] = result
                lines.append(json.dumps({"key": name, "rewards": result}) + "\n")
            if not lines:
                return
            self._fence()
            self._file.append("".join(lines).encode(), durable=True)

    def _load(self) -> dict[str, Result]:
        if self._known is None:
            self._known = {}
            if os.path.exists(self._path):
                self._fence()
                self._known.update(filter(None, map(_read_line, read_file(self._path).splitlines())))
        return self._known


def _read_line(line: bytes) -> tuple[str, Result] | None:
    """Return key and result; None if the line is damaged."""
    try:
        document = parse_object(line, {"key": str, "rewards": [({str: is_number}, str)]})
    except ValueError:
        return None
    return document["key"], document["rewards"]
