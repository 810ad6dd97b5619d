"""The answers of `reward.url`, by content, so that no judge is asked twice, and a replay gets the same rewards."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import xxhash

from trainer.files.appended import AppendedFile
from trainer.files.atomic_io import read_file
from trainer.files.documents import is_number, parse_object
from trainer.files.redaction import redact
from trainer.rewards.parsing import Result

CACHE_FILE = "rewards.jsonl"


def key_of(url: str, given: Mapping[str, Any]) -> str:
    """Return the key of an answer: a hash of the address and of what is judged. It does not depend on credentials."""
    content = json.dumps([redact(url, references=False), given], sort_keys=True, default=str)
    return xxhash.xxh3_128_hexdigest(content.encode())


class RewardCache:
    """The file `{run_dir}/rewards.jsonl`: a line for each answer. Lines are only appended, while `fence` does not
    raise. Any thread may use it."""

    def __init__(self, run_dir: str, fence: Callable[[], None] = lambda: None):
        self._path = os.path.join(run_dir, CACHE_FILE)
        self._fence = fence
        self._file = AppendedFile(self._path, fence, mode=0o600)  # a server's answers are for the user alone
        self._known: dict[str, Result] | None = None
        self._lock = threading.Lock()

    def find(self, keys: Iterable[str]) -> dict[str, Result]:
        with self._lock:
            known = self._load()
            return {key: known[key] for key in keys if key in known}

    def add(self, results: Mapping[str, Result]) -> None:
        """Add results, without failures, and wait until they are on the disk. If it is full, they wait in memory."""
        with self._lock:
            new = {key: result for key, result in results.items() if all(isinstance(terms, dict) for terms in result)}
            self._load().update(new)
            lines = [json.dumps({"key": key, "rewards": result}) + "\n" for key, result in new.items()]
            if lines:
                self._file.append("".join(lines).encode(), durable=True)

    def _load(self) -> dict[str, Result]:
        if self._known is None:
            self._fence()
            self._known = {}
            for line in read_file(self._path).splitlines() if os.path.exists(self._path) else []:
                with contextlib.suppress(ValueError):  # the line is damaged
                    answer = parse_object(line, {"key": str, "rewards": [{str: is_number}]})
                    self._known[answer["key"]] = answer["rewards"]
        return self._known
