"""Small checkpoints, without ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from trainer.checkpoint.manager import CheckpointManager
from trainer.checkpoint.manifest import Checkpoint
from trainer.checkpoint.parts import Part, Restore, files_part, json_part
from trainer.checkpoint.retention import Retention
from trainer.checkpoint.store import LocalStore


def manager(root: Path, retention: Retention | None = None, **options) -> CheckpointManager:
    return CheckpointManager(LocalStore(str(root)), retention, **options)


def parts_of(state: dict) -> list[Part]:
    """`state` as two parts: the number `n` in a JSON file, and `bytes` in another."""

    def load(checkpoint: Checkpoint, _: Restore) -> None:
        state["bytes"] = checkpoint.files.read("weights/shard")

    return [
        json_part("counters", lambda: {"n": state["n"]}, lambda saved: state.update(saved)),
        files_part("weights", lambda: {"weights/shard": state["bytes"]}, load),
    ]


def save(checkpoints: CheckpointManager, step: int, parts: Sequence[Part] | None = None, **description) -> str:
    """Save these parts, or a state that never changes; returns the path of the checkpoint."""
    checkpoints.save(step, parts_of({"n": 1, "bytes": b"abc"}) if parts is None else parts, description)
    checkpoints.wait()
    (outcome,) = checkpoints.outcomes()
    assert outcome.error is None, outcome.error
    return outcome.path


def hidden(root: Path) -> list[str]:
    """The kinds of hidden entries in a directory."""
    return sorted(name.split("global")[0] for name in os.listdir(root) if name.startswith("."))
