"""Saving and loading whole checkpoints: parts register by name, a manifest commits them.

A checkpoint is written to a directory that no reader looks at (`.writing-global_step_N`), made durable,
described by `manifest.json`, and then renamed to `global_step_N`. Only a directory whose manifest agrees
with its files is a checkpoint.
"""

from __future__ import annotations

import json
import posixpath
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trainer import __version__
from trainer.checkpoint.storage import Storage
from trainer.errors import UserError

FORMAT_VERSION = 1
HINT = "latest_ckpt_global_step.txt"
_WRITING = ".writing-"
_STEP_DIR = re.compile(r"^global_step_(\d+)$")


@dataclass(frozen=True)
class Part:
    """One thing that a checkpoint holds: `save(directory)` writes it below the checkpoint's directory,
    `load(directory)` restores it."""

    name: str
    save: Callable[[str], None]
    load: Callable[[str], None]


def json_part(name: str, state: Callable[[], dict], restore: Callable[[dict], None]) -> Part:
    """A part kept as `{name}.json`."""

    def save(directory: str) -> None:
        storage = Storage(directory)
        storage.write(f"{name}.json", json.dumps(state(), indent=2, sort_keys=True))

    def load(directory: str) -> None:
        restore(json.loads(Storage(directory).read(f"{name}.json")))

    return Part(name, save, load)


class CheckpointManager:
    """The checkpoints of one run below `ckpt_path`.

    Args:
        max_to_keep: newest checkpoints to keep; -1: all.
    """

    def __init__(self, ckpt_path: str, max_to_keep: int = -1):
        self.storage = Storage(ckpt_path)
        self.max_to_keep = max_to_keep
        self._parts: list[Part] = []

    def register(self, part: Part) -> None:
        assert part.name not in [p.name for p in self._parts], part.name
        self._parts.append(part)

    def save(self, step: int, description: dict[str, Any]) -> str:
        """Write `global_step_{step}` from all parts; returns its path.

        Args:
            description: what the manifest says besides its files (ranks, mesh, versions, config digest).
        """
        name, writing = f"global_step_{step}", f"{_WRITING}global_step_{step}"
        for leftover in (entry for entry in self.storage.list() if entry.startswith(_WRITING)):
            self.storage.remove(leftover)
        self.storage.make(writing)
        for part in self._parts:
            part.save(self.storage.path(writing))
        self.storage.sync(writing)
        manifest = {
            "format_version": FORMAT_VERSION,
            "step": step,
            "parts": [part.name for part in self._parts],
            "trainer_version": __version__,
            "python_version": sys.version.split()[0],
            "parent_step": max(self.steps(), default=None),
            **description,
            "files": [{"path": path, "bytes": size} for path, size in self.storage.files(writing).items()],
        }
        self.storage.write(f"{writing}/manifest.json", json.dumps(manifest, indent=2))
        if self.storage.exists(name):  # saved before, then the run went back: the newer one replaces it
            self.storage.remove(name)
        self.storage.rename(writing, name)
        self.storage.write(HINT, f"{step}\n")
        self._prune()
        return self.storage.path(name)

    def load(self, path: str) -> int:
        """Restore all registered parts from the checkpoint directory `path`; returns its step."""
        manifest = read_manifest(path)
        for part in self._parts:
            if part.name not in manifest["parts"]:
                raise UserError(f"trainer.resume_path={path}: the checkpoint has no {part.name}; "
                                f"it holds {', '.join(manifest['parts'])}")  # fmt: skip
            part.load(path)
        return manifest["step"]

    def steps(self) -> list[int]:
        """Steps of the directories that are named like checkpoints, ascending."""
        return sorted(int(match[1]) for match in map(_STEP_DIR.match, self.storage.list()) if match)

    def latest(self) -> str | None:
        """Path of the newest valid checkpoint; None when there is none at all.

        Raises:
            UserError: there are checkpoints, but none is valid.
        """
        problems = []
        for step in reversed(self.steps()):
            path = self.storage.path(f"global_step_{step}")
            try:
                read_manifest(path)
                return path
            except UserError as error:
                problems.append(str(error))
        if problems:
            raise UserError(f"trainer.resume_mode=latest: no checkpoint in {self.storage.root} is valid: {problems[0]}")
        return None

    def resolve(self, resume_mode: str | None, resume_path: str | None) -> str | None:
        """The checkpoint to start from, None for a new run.

        Raises:
            UserError: `from_path` without a valid checkpoint there.
        """
        if resume_mode == "latest":
            return self.latest()
        if resume_mode == "from_path":
            assert resume_path is not None
            path = resume_path.rstrip("/")
            if not _STEP_DIR.match(posixpath.basename(path)):
                raise UserError(f"trainer.resume_path={resume_path}: must be a global_step_N directory")
            read_manifest(path)
            return path
        return None

    def _prune(self) -> None:
        if self.max_to_keep > 0:
            for step in self.steps()[: -self.max_to_keep]:
                self.storage.remove(f"global_step_{step}")


def read_manifest(path: str) -> dict[str, Any]:
    """The manifest of the checkpoint at `path`, checked against the files' sizes.

    Raises:
        UserError: no manifest, one of another format, or a file that is missing or has another size.
    """
    storage = Storage(path)
    if not storage.exists("manifest.json"):
        raise UserError(f"{path}: not a checkpoint, it has no manifest.json")
    try:
        manifest = json.loads(storage.read("manifest.json"))
    except ValueError as error:
        raise UserError(f"{path}: manifest.json is damaged ({error})") from error
    if manifest.get("format_version") != FORMAT_VERSION:
        raise UserError(f"{path}: format version {manifest.get('format_version')}, this is {FORMAT_VERSION}")
    sizes = storage.files("")
    for entry in manifest["files"]:
        if sizes.get(entry["path"]) != entry["bytes"]:
            raise UserError(f"{path}: {entry['path']} is damaged: {sizes.get(entry['path'], 'no')} bytes "
                            f"instead of {entry['bytes']}")  # fmt: skip
    return manifest
