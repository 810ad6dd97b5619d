"""The files of the run directory that checkpoints carry, so that the run continues on a machine with an empty disk.

These files only grow, so a checkpoint does not copy them. It has `carried.json`, which lists the pieces of each file,
and the store keeps every piece once, for all checkpoints. A save adds the piece that is new since the save before.
"""

from __future__ import annotations

import contextlib
import glob
import json
import logging
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from typing import Any

from trainer.checkpoint import manifest as manifests
from trainer.checkpoint.components import Component
from trainer.checkpoint.manifest import Checkpoint, CorruptCheckpointError
from trainer.checkpoint.storage import Storage, StoreError
from trainer.checkpoint.store import CheckpointStore
from trainer.errors import one_line
from trainer.files.atomic_io import digest_bytes, write_file

LOG = logging.getLogger(__name__)

COMPONENT = "carried"
FILE = "carried.json"
PATTERNS = (
    "metrics.jsonl",
    "lineage.json",
    "starts.jsonl",
    "rewards.jsonl",
    "incidents.jsonl",
    "rollouts/step_*.arrow",
    "rollouts/step_*.jsonl",
    "validation/step_*.jsonl",
)
_PRIVATE = ("rewards.jsonl",)  # the files that only the user may read
_MOST_PIECES = 64
_PARALLEL = 16


Piece = dict[str, Any]
"""A piece of a file: `bytes`, its size, and `hash`, its xxh3-128, which is its name in the store."""


class RunFiles:
    """The files of one run directory, and the pieces of them that the store has."""

    def __init__(self, run_dir: str, store: CheckpointStore):
        self._run_dir = run_dir
        self._store = store
        # The stamp at the last save of this process, and the pieces.
        self._saved: dict[str, tuple[tuple[int, int, int] | None, list[Piece]]] = {}

    def component(self) -> Component:
        """Return the component of a checkpoint that lists the pieces."""

        def begin(staging: Storage) -> Callable[[], list[manifests.FileEntry]]:
            stamps = self._stamps()
            return lambda: [staging.write(FILE, json.dumps({"files": self._keep(stamps)}, indent=1).encode())]

        return Component(COMPONENT, begin, kinds=())

    def restore(self, checkpoint: Checkpoint) -> None:
        """Write the files that the checkpoint carries, unless the run directory has them.

        A file of the run directory that begins with the content that the checkpoint carries stays: it has more lines.

        Raises:
            CorruptCheckpointError: a piece is missing or damaged.
            UserError: the store fails.
        """
        missing, listed = {}, _listed(checkpoint)
        self._saved = {path: (None, pieces) for path, pieces in listed.items()}  # the next save adds to these pieces
        for path, pieces in listed.items():
            if not _is_carried(path):
                raise CorruptCheckpointError(f"{checkpoint.path}: {FILE} names {path!r}, which no checkpoint carries")
            if not self._has(path, pieces):
                missing[path] = pieces
        with ThreadPoolExecutor(_PARALLEL) as pool:
            for path, pieces in missing.items():
                content = b"".join(pool.map(lambda piece: self._fetch(checkpoint, piece), pieces))
                target = os.path.join(self._run_dir, path)
                os.makedirs(os.path.dirname(target), exist_ok=True)
                write_file(target, content, mode=0o600 if path in _PRIVATE else None)
        if missing:
            LOG.info("restored %d file(s) in %s from %s", len(missing), self._run_dir, checkpoint.path)

    def remove_unused(self) -> None:
        """Delete the pieces that no checkpoint names, as killed saves and deleted checkpoints leave them.

        Call it before the first save of this process, which must hold the lock. While a checkpoint is archived or
        cannot be read, nothing is deleted: it may name any piece.
        """
        try:
            unused = set(self._store.pieces())
            if not unused or self._store.archived():
                return
            steps = self._store.steps()
            with ThreadPoolExecutor(_PARALLEL) as pool:
                for chosen in (steps[-1:], steps[:-1]):  # the newest checkpoint names nearly all
                    for files in pool.map(lambda step: _listed(manifests.read(self._store.path(step))), chosen):
                        unused -= {piece["hash"] for pieces in files.values() for piece in pieces}
                    if not unused:
                        return
            self._store.remove_pieces(unused)
            LOG.info("removed %d piece(s) of files that no checkpoint names", len(unused))
        except (manifests.CheckpointError, OSError) as error:
            LOG.warning("pieces of files that no checkpoint names are not deleted: %s", error)

    # ---------------------------------------------------------------------------------------------------

    def _stamps(self) -> dict[str, tuple[int, int, int]]:
        paths = sorted(path for pattern in PATTERNS for path in glob.glob(pattern, root_dir=self._run_dir))
        stats = {path: os.stat(os.path.join(self._run_dir, path)) for path in paths}
        return {path: (one.st_size, one.st_mtime_ns, one.st_ino) for path, one in stats.items()}

    def _keep(self, stamps: Mapping[str, tuple[int, int, int]]) -> dict[str, list[Piece]]:
        """Return the pieces of files up to the sizes in `stamps`, and keep in the store those that it lacks."""
        for path, stamp in stamps.items():
            last_stamp, pieces = self._saved.get(path, (None, []))
            if last_stamp == stamp:
                continue
            with open(os.path.join(self._run_dir, path), "rb") as file:
                data = file.read(stamp[0])
            pieces = _common(pieces, data)
            if len(pieces) >= _MOST_PIECES:
                pieces = []
            start = sum(piece["bytes"] for piece in pieces)
            if start < len(data):
                piece = {"bytes": len(data) - start, "hash": digest_bytes(data[start:])}
                self._store.keep_piece(piece["hash"], data[start:])
                pieces = [*pieces, piece]
            self._saved[path] = stamp, pieces
        return {path: self._saved[path][1] for path in stamps}

    def _has(self, path: str, pieces: list[Piece]) -> bool:
        """Return whether the file in the run directory begins with these pieces."""
        target = os.path.join(self._run_dir, path)
        with contextlib.suppress(FileNotFoundError, IsADirectoryError), open(target, "rb") as file:
            return _common(pieces, file.read(sum(piece["bytes"] for piece in pieces))) == pieces
        return False

    def _fetch(self, checkpoint: Checkpoint, piece: Piece) -> bytes:
        try:
            data = self._store.piece(piece["hash"])
        except StoreError:
            raise
        except OSError as error:
            reason = one_line(str(error))
            raise CorruptCheckpointError(
                f"{checkpoint.path}: a piece of a carried file cannot be read ({reason})"
            ) from error
        if digest_bytes(data) != piece["hash"]:
            raise CorruptCheckpointError(f"{checkpoint.path}: the piece {piece['hash']} of a carried file is damaged")
        return data


def _listed(checkpoint: Checkpoint) -> dict[str, list[Piece]]:
    """Return the pieces of the files that a checkpoint carries, by file."""
    if COMPONENT not in checkpoint.manifest["parts"]:
        return {}
    return manifests.read_object(checkpoint, FILE, {"files": manifests.CARRIED})["files"]


def _common(pieces: list[Piece], data: bytes) -> list[Piece]:
    """Return the pieces, from the first on, that `data` begins with."""
    start = 0
    for number, piece in enumerate(pieces):
        end = start + piece["bytes"]
        if end > len(data) or digest_bytes(data[start:end]) != piece["hash"]:
            return pieces[:number]
        start = end
    return pieces


def _is_carried(path: str) -> bool:
    return ".." not in path and any(
        fnmatchcase(path, pattern) and path.count("/") == pattern.count("/") for pattern in PATTERNS
    )
