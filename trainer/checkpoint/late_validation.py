"""`validated.json`: what a late validation adds to a checkpoint that was saved before it.

A signal can end the validation of a step. Its checkpoint then has `lacks_validation` in its manifest, and the next
start validates. A committed manifest does not change, so this file, which no manifest names, holds the score. If
checkpoints carry the files of the run directory, it also lists the pieces of these files after the validation. One put
writes it.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Mapping
from typing import Any

from trainer.checkpoint.checkpoint_files import CheckpointFiles
from trainer.checkpoint.manifest import (
    CARRIED,
    OPTIONAL_FIELDS,
    Checkpoint,
    CorruptCheckpointError,
    digest_of,
    reading,
)
from trainer.files.documents import parse_object

LOG = logging.getLogger(__name__)

NAME = "validated.json"
_SCORE = ("score_metric", "score_mode", "score")
_SHAPE = {**{name: OPTIONAL_FIELDS[name] for name in _SCORE}, "files": CARRIED, "self": str}


def dump(score: Mapping[str, Any], files: Mapping[str, Any]) -> bytes:
    """Return the content of the file.

    Args:
        score: the fields of a manifest that say the score (see `trainer.metrics.best.score_of`).
        files: the pieces of each file of the run directory; empty: checkpoints do not carry them.
    """
    body = {**score, "files": files}
    return json.dumps({**body, "self": digest_of(body)}, indent=2).encode()


def read(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """Return the content of the file. None: there was no late validation, or its file is damaged.

    Raises:
        UnreadableError: the file cannot be read now.
        StoreError: the object store fails.
    """
    if not checkpoint.manifest.get("lacks_validation"):
        return None
    try:
        with reading(checkpoint.path, NAME), contextlib.suppress(FileNotFoundError):
            body = parse_object(checkpoint.files.read(NAME), _SHAPE)
            if body.pop("self") != digest_of(body):
                raise ValueError("its content does not match its own hash")
            return body
    except CorruptCheckpointError as error:
        LOG.warning("%s; the validation of this step counts as not done", error)
    return None


def score_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the fields of the score that a checkpoint has: those of its late validation, or of its manifest."""
    fields = read(checkpoint) or checkpoint.manifest
    return {name: fields[name] for name in _SCORE if name in fields}


def copy(checkpoint: Checkpoint, target: CheckpointFiles) -> None:
    """Give a copy of a checkpoint the file, if the checkpoint has it."""
    with contextlib.suppress(FileNotFoundError):
        target.storage.put(NAME, checkpoint.files.read(NAME))
