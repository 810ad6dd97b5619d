"""Which weights sampled: a digest of all that a run has trained on, and which episodes a record stands for."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

from trainer import __version__
from trainer.checkpoint.components import Restore, fingerprint_weights
from trainer.checkpoint.manifest import Checkpoint, read_object
from trainer.config import Config
from trainer.episodes import Episode
from trainer.files.atomic_io import digest_file
from trainer.import_utils import digest_code

_TEMPLATE = "model.chat_template"


@dataclass(frozen=True)
class Identity:
    """Digests of the settings that decide what a step does.

    Settings that only round in another way, such as the number of ranks, are in neither.
    """

    rollouts: str  # of those that decide rollouts and rewards
    updates: str  # of those that decide the update, and of the ones before
    by_key: Mapping[str, str] = field(default_factory=dict)
    """Of each setting that decides rollouts and rewards. No code counts, no version and no weights."""


def digest(*parts: Any) -> str:
    """Return a digest of values that JSON knows, and of their order."""
    return hashlib.blake2b(json.dumps(parts, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()


def identity(rollouts: Mapping[str, Any], updates: Mapping[str, Any], weights: str) -> Identity:
    """Return the identity of a run.

    The files of the functions and classes that the settings name by import path count, too, and that of the chat
    template: the key of a record has no tokens if an environment makes the prompts.

    Args:
        rollouts: the settings that decide rollouts and rewards, by key.
        updates: the settings that decide the update, by key.
        weights: fingerprint of the initial weights with which the run still computes, and of the files beside them.
    """
    content = [weights, rollouts, code_in(rollouts)]
    template = rollouts.get(_TEMPLATE)
    if template and os.path.isfile(template):  # who reads a missing one says so
        content.append(digest_file(template))
    of_rollouts = digest(__version__, *content)
    by_key = {key: digest(value) for key, value in rollouts.items()}
    return Identity(of_rollouts, digest(of_rollouts, updates, code_in(updates)), by_key)


def code_in(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the digests of the files that settings name by import path, at any depth."""
    found = {path: digest_code(path) for path in _texts_in(settings)}
    return {path: of_path for path, of_path in found.items() if of_path}


def _texts_in(settings: Any) -> Iterator[str]:
    if isinstance(settings, str):
        yield settings
    values = settings.values() if isinstance(settings, Mapping) else settings if isinstance(settings, list) else ()
    for value in values:
        yield from _texts_in(value)


def first_history(cfg: Config, model_path: str) -> str:
    """Return the history of the weights that a run begins with."""
    return digest("start", fingerprint_weights(cfg, model_path, begins=True))


def history_at(checkpoint: Checkpoint, restore: Restore) -> str:
    """Return the history of the weights that a run continues with. That of a fork begins with its parent.

    Without a saved one, it begins with the checkpoint.
    """
    saved = None if restore.fork else read_object(checkpoint, "trainer_state.json").get("history")
    if not isinstance(saved, str):
        saved = digest("checkpoint", checkpoint.manifest["self"], sorted(restore.kinds), restore.fork)
    return saved


def after(history: str, episodes: Iterable[Episode], settings: Identity) -> str:
    """Return the history of the weights that come of an update, from the history of the weights before it."""
    return digest(history, digest_episodes(episodes), settings.updates)


def digest_episodes(episodes: Iterable[Episode]) -> str:
    """Return a digest of the content of episodes, and of their order."""
    content = xxhash.xxh3_128()
    for episode in episodes:
        fields = (episode.group, episode.uid, episode.status, episode.failure, episode.turns, len(episode.samples))
        content.update(repr(fields).encode("utf-8", "surrogatepass"))
        content.update(_bits(episode.reward) + _bits(episode.baseline))
        for sample in episode.samples:
            arrays: Sequence[Any] = (sample.token_ids, sample.mask, sample.logprobs)
            for array, kind in zip(arrays, (np.int64, np.float32, np.float32), strict=True):
                content.update(b"none" if array is None else np.asarray(array, kind).tobytes())
            content.update(f"{len(sample.token_ids)} {sample.weight_versions}".encode())
            if sample.player or sample.sampled_by:
                content.update(repr((sample.player, sample.sampled_by)).encode() + _bits(sample.reward))
    return content.hexdigest()


def _bits(value: float | None) -> bytes:
    return b"none" if value is None else struct.pack("<d", value)
