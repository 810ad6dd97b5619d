"""Small checkpoints."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from trainer.checkpoint import manifest as manifests
from trainer.checkpoint.components import Component, Restore, files_component, json_component
from trainer.checkpoint.manager import CheckpointManager, Retention
from trainer.checkpoint.manifest import Checkpoint
from trainer.checkpoint.sharded import ShardedFiles
from trainer.checkpoint.storage import Storage
from trainer.checkpoint.store import open_store


def manager(root: Path, retention: Retention | None = None, **options) -> CheckpointManager:
    return CheckpointManager(open_store(str(root)), retention, **options)


def parts_of(state: dict) -> list[Component]:
    """`state` as two parts: the number `n` in a JSON file, and `bytes` in another."""

    def load(checkpoint: Checkpoint, _: Restore) -> None:
        state["bytes"] = checkpoint.files.get("weights/shard")

    return [
        json_component("counters", lambda: {"n": state["n"]}, lambda saved: state.update(saved)),
        files_component("weights", lambda: {"weights/shard": state["bytes"]}, load),
    ]


def save(checkpoints: CheckpointManager, step: int, parts: Sequence[Component] | None = None, **description) -> str:
    """Save these parts, or a state that never changes; returns the path of the checkpoint."""
    checkpoints.save(step, parts_of({"n": 1, "bytes": b"abc"}) if parts is None else parts, description)
    checkpoints.wait()
    (outcome,) = checkpoints.results()
    assert outcome.error is None, outcome.error
    return outcome.path


def give_newer_format(checkpoint: Path) -> None:
    """Give a checkpoint a manifest of a version to come."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    (checkpoint / "manifest.json").write_text(
        json.dumps({**manifest, "format_version": manifests.FORMAT_VERSION + 1, "trainer_version": "9.9", "parts": 1})
    )


def hidden(root: Path) -> list[str]:
    """The kinds of hidden entries in a directory."""
    return sorted(name.split("global")[0] for name in os.listdir(root) if name.startswith("."))


def sharded_parts(state: dict) -> list[Component]:
    def begin(staging: Storage):
        files = ShardedFiles(staging.root)
        tensors = {"w": state["w"].clone(), "lr": state["lr"]}
        group = dist.group.WORLD
        return lambda: [manifests.FileEntry(**e) for e in files.write("policy", tensors, {"extra.json": "{}"}, group)]

    def load(checkpoint: Checkpoint, _: Restore) -> None:
        tensors = {"w": torch.zeros(8), "lr": 0.0}
        ShardedFiles(checkpoint.path).read("policy", tensors)
        state.update(w=tensors["w"], lr=tensors["lr"])

    counter = json_component("trainer_state", lambda: {"n": state["n"]}, lambda saved: state.update(saved))
    return [counter, Component("policy", begin, load)]


def write_two(rank, root: str) -> None:
    state: dict = {}
    checkpoints, parts = manager(Path(root)), sharded_parts(state)
    for n in (1, 2):
        state.update(n=n, w=torch.arange(8.0) + n, lr=n / 10)
        save(checkpoints, n, parts)
