"""Records of turns: replies of the policy and answers of environments, written while their episodes still run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

_NO_TOKENS, _NO_LOGPROBS = np.zeros(0, np.int32), np.zeros(0, np.float32)


@dataclass(slots=True, eq=False)
class TurnRecord:
    """A reply of the policy, or an answer of the environment to it."""

    key: str  # of the episode
    name: str  # of the reply or the answer, within the episode
    about: Mapping[str, Any]  # what else it holds, as JSON knows it
    token_ids: np.ndarray = field(default_factory=lambda: _NO_TOKENS)  # `(T,)` int32, of a reply
    logprobs: np.ndarray = field(default_factory=lambda: _NO_LOGPROBS)
    """`(T,)` float32, of its tokens."""
    sampled_by: tuple[int, str] | None = None
    """In flight: the newest version of the weights at the end of the turn, and its history."""
    is_company: bool = False
    """Whether the bits of other replies depend on it: it is recorded even where its episode has ended meanwhile."""


def encode_turns(records: Sequence[TurnRecord], about: Mapping[str, str]) -> bytes:
    """Return a file of turns: a line of JSON, then all tokens, then all log-probs."""
    rows = [[one.key, one.name, one.about, len(one.token_ids)] for one in records]
    replies = [one for one in records if len(one.token_ids)]
    tokens = [np.asarray(one.token_ids, np.int32) for one in replies]
    logprobs = [np.asarray(one.logprobs, np.float32) for one in replies]
    return b"".join([json.dumps([dict(about), rows]).encode(), b"\n", *tokens, *logprobs])


def decode_turns(data: bytes) -> list[TurnRecord]:
    """Return the turns of a file.

    Raises:
        ValueError: the file is another one.
    """
    line, _, arrays = data.partition(b"\n")
    about, rows = json.loads(line)
    half = len(arrays) // 2
    tokens, logprobs = np.frombuffer(arrays[:half], np.int32), np.frombuffer(arrays[half:], np.float32)
    sampled_by = (int(about["version"]), about["history"]) if "version" in about else None
    records, start = [], 0
    for key, name, content, count in rows:
        one = slice(start, start + count)
        records.append(TurnRecord(key, name, content, tokens[one], logprobs[one], sampled_by))
        start += count
    if start != len(tokens) or half * 2 != len(arrays):
        raise ValueError("it has another number of tokens")
    return records
